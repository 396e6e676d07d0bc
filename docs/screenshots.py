"""Take the pictures of the pages that a person looks at, with headless Chromium.

    pip install playwright
    python docs/screenshots.py mlflow runs/first runs/mixed
    python docs/screenshots.py report runs/first runs/mixed runs/collapse
    python docs/screenshots.py prefect http://127.0.0.1:4200 "$PREFECT_API_AUTH_STRING"
    make docs && python docs/screenshots.py site

The first one shows the list of runs, a run, a comparison and completions in MLflow. Both runs must be
tracked in one store or server. The second one shows reports, of two runs and of one that collapsed, wide and narrow,
light and dark. The third one shows pages of Prefect's server that `fp8-grpo up` runs: deployments, a
run, one of its steps, and the form that starts one. The run is the one of `fp8-grpo/tiny` that ended last. A short one
makes readable pictures (below). The last one shows the first page of build/site.

    prefect deployment run fp8-grpo/tiny --watch --param steps=8

Chromium is the one on the path, or playwright's own (`playwright install chromium`). The pictures go to docs/images/,
or to the folder of --out.
"""

import argparse
import base64
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

from flows.tracking.backlog import COMPLETIONS
from flows.tracking.record import ServiceRecord, read_record
from flows.tracking.store import is_server
from fp8core.report.pages import report_html
from fp8core.report.run_data import labels, read_run

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1440, 900
TABLE: ViewportSize = {"width": 1440, "height": 760}
SHOWN = "^core/"
"""The charts of MLflow's pages, as a pattern."""
DRAWN = """() => {
    const charts = [...document.querySelectorAll('.js-plotly-plot')];
    return charts.length >= 6 && charts.every(chart => chart.querySelector('.trace'));
}"""
"""True when the charts that a page of MLflow shows have their data; a flat line has no height, so it is not visible."""
NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
COLUMNS = ["Dataset", "Source", "core/1_reward", "core/2_heldout", "core/3_error_minus_1", "core/4_k3"]
"""Of the list of runs: two that are hidden then, and four that are shown."""
COLOURS = 192
PATIENCE_SECONDS = 180.0
SETTLE_MS = 3000
"""Time in which charts move to their places, pages fade in, and a timeline moves to its tasks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER", help="where the pictures go")
    services = parser.add_subparsers(dest="service", required=True)
    services.add_parser("mlflow").add_argument("runs", metavar="RUN", nargs=2, type=Path, help="folder of a run")
    services.add_parser("report").add_argument("runs", metavar="RUN", nargs=3, type=Path, help="folder of a run")
    services.add_parser("site")
    prefect = services.add_parser("prefect")
    prefect.add_argument("server", help="its address")
    prefect.add_argument("login", help="PREFECT_API_AUTH_STRING of that server")
    options = parser.parse_args()
    if options.service == "mlflow":
        mlflow_pictures(options.runs, options.out)
    elif options.service == "report":
        report_pictures(options.runs, options.out)
    elif options.service == "site":
        with browser() as page:
            page.goto((IMAGES.parents[1] / "build" / "site" / "index.html").as_uri())
            page.wait_for_timeout(SETTLE_MS)
            keep(page.screenshot(), options.out / "site.png")
    else:
        prefect_pictures(options.server, options.login, options.out)


def mlflow_pictures(runs: list[Path], out: Path) -> None:
    """Serve MLflow, look at each page, and keep what is seen."""
    records = [recorded(folder) for folder in runs]
    with mlflow_ui(records[0].uri) as address, browser() as page:
        for name, url in mlflow_pages(address, records).items():
            page.goto(url)
            search = page.get_by_placeholder("Search metric charts")
            search.wait_for()
            search.fill(SHOWN)
            page.wait_for_function(DRAWN)
            page.wait_for_timeout(SETTLE_MS)
            keep(page.screenshot(), out / f"{name}.png")
        page.set_viewport_size({"width": WIDTH, "height": 450})
        page.goto(f"{address}/#/experiments/{records[0].experiment_id}/runs?workflowType=machine_learning")
        page.get_by_role("button", name="Columns").click()
        for column in COLUMNS:
            page.get_by_role("dialog").get_by_text(column, exact=True).first.click()
        page.keyboard.press("Escape")
        page.wait_for_timeout(SETTLE_MS)
        keep(page.screenshot(), out / "mlflow-runs.png")
        page.set_viewport_size(TABLE)
        page.goto(completions_page(address, records[1]))
        page.get_by_role("cell", name=re.compile("[0-9]=$")).first.wait_for()
        # A folder of the machine that took the picture.
        page.get_by_text(re.compile("^Path: ")).first.evaluate("element => { element.style.visibility = 'hidden' }")
        page.wait_for_timeout(SETTLE_MS)
        keep(page.screenshot(), out / "mlflow-completions.png")


def report_pictures(runs: list[Path], out: Path) -> None:
    """Look at the report of the first two runs and at that of the third."""
    views: dict[str, tuple[list[Path], int, int, Literal["light", "dark"]]] = {
        "report": (runs[:2], 1400, 1825, "light"),
        "report-dark": (runs[2:], 1400, 650, "dark"),
    }
    with tempfile.TemporaryDirectory() as scratch, browser() as page:
        for name, (folders, width, height, colours) in views.items():
            report = Path(scratch) / "report.html"
            report.write_text(report_html([*map(read_run, folders, labels(folders))]))
            page.emulate_media(color_scheme=colours)
            page.set_viewport_size({"width": width, "height": height})
            page.goto(report.as_uri())
            page.wait_for_timeout(SETTLE_MS)
            keep(page.screenshot(), out / f"{name}.png")


def recorded(folder: Path) -> ServiceRecord:
    """Where a run is in MLflow."""
    if (tracked := read_record(folder)) is None or (record := tracked.mlflow) is None:
        sys.exit(f"{folder}: no MLflow run (no tracking.json)")
    return record


def mlflow_pages(address: str, records: list[ServiceRecord]) -> dict[str, str]:
    """Name of the picture -> address of the page."""
    experiment = f"{address}/#/experiments/{records[0].experiment_id}"
    both = quote(f"attributes.run_id IN ({', '.join(repr(record.run_id) for record in records)})")
    classic = "workflowType=machine_learning"
    return {
        "mlflow-run": f"{experiment}/runs/{records[1].run_id}/model-metrics?{classic}",
        "mlflow-compare": f"{experiment}/runs?compareRunsMode=CHART&searchFilter={both}&{classic}",
    }


def completions_page(address: str, record: ServiceRecord) -> str:
    """Address of the table of completions of a run."""
    run = f"{address}/#/experiments/{record.experiment_id}/runs/{record.run_id}"
    return f"{run}/artifacts/{COMPLETIONS}?workflowType=machine_learning"


@contextmanager
def mlflow_ui(uri: str) -> Iterator[str]:
    """The address of MLflow's UI on a store while the block lasts; a server has its own."""
    if is_server(uri):
        yield uri
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"{address}/health")
        yield address
    finally:
        server.terminate()
        server.wait()


def prefect_pictures(server: str, login: str, out: Path) -> None:
    """Look at the pages of the last run and of the form, and keep what is seen."""
    password = base64.b64encode(login.encode()).decode()
    deployment = _ask(password, f"{server}/api/deployments/name/fp8-grpo/tiny")["id"]
    query = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    (run,) = _ask(password, f"{server}/api/flow_runs/filter", query)
    second = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}, "name": {"any_": ["step 2"]}}}
    (step,) = _ask(password, f"{server}/api/flow_runs/filter", second)
    pages = {
        "prefect-deployments.png": (f"{server}/deployments", 1400, 940, "llama-nightly"),
        "prefect-runs.png": (f"{server}/runs?hide-subflows=true", 1400, 820, run["name"]),
        "prefect-run.png": (f"{server}/runs/flow-run/{run['id']}", 1400, 560, run["name"]),
        "prefect-step.png": (f"{server}/runs/flow-run/{step['id']}", 1400, 900, step["name"]),
        "prefect-form.png": (f"{server}/deployments/deployment/{deployment}/run", 1200, 1150, "overrides (Optional)"),
    }
    with browser() as page:
        page.add_init_script(f"localStorage.setItem('prefect-password', '{password}')")
        for name, (address, width, height, text) in pages.items():
            page.set_viewport_size({"width": width, "height": height})
            page.goto(address)
            # Not for a silent network: these pages ask the server again and again.
            page.get_by_text(text).first.wait_for()
            page.wait_for_timeout(SETTLE_MS)
            keep(page.screenshot(), out / name)


def _ask(password: str, url: str, query: dict[str, Any] | None = None) -> Any:
    data = None if query is None else json.dumps(query).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", "Authorization": f"Basic {password}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def wait_for(url: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a headless Chromium."""
    options: dict[str, Any] = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**options)
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.add_init_script(NO_ASSISTANT)
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        yield page
        chromium.close()


def keep(picture: bytes, path: Path) -> None:
    """Write a picture with few colours, which makes it small; say how large it is."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
