def test_without_an_environment_a_manifest_has_no_seconds_of_answers(whole_run):
    manifests = [whole_run.store.get_json(entry.manifest) for entry in whole_run.ledger.steps().values()]
    assert [manifest["observed"]["environment"] for manifest in manifests] == [{}] * 5
    assert [manifest["observed"]["answers"] for manifest in manifests] == [{}] * 5
