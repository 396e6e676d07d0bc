"""Take the pictures of Prefect's pages in docs/images/ with headless Chromium, from a server that `fp8-grpo up` runs.

    python docs/screenshots_prefect.py http://127.0.0.1:4200 "$PREFECT_API_AUTH_STRING"

Needs what docs/screenshots.py needs. It shows the run of `fp8-grpo/tiny` that ended last, and the form that starts one.
A short run makes a readable picture:

    prefect deployment run fp8-grpo/tiny --watch --param steps=4
"""

import base64
import json
import sys
import urllib.request
from typing import Any

from screenshots import IMAGES, browser, keep

# Pages fade in, and the timeline moves to where the tasks are.
SETTLE_MS = 5000


def main(server: str, login: str) -> None:
    password = base64.b64encode(login.encode()).decode()
    deployment = _ask(password, f"{server}/api/deployments/name/fp8-grpo/tiny")["id"]
    query = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    (run,) = _ask(password, f"{server}/api/flow_runs/filter", query)
    pages = {
        "prefect-run.png": (f"{server}/runs/flow-run/{run['id']}", 1400, 520),
        "prefect-form.png": (f"{server}/deployments/deployment/{deployment}/run", 1200, 1150),
    }
    with browser() as page:
        page.add_init_script(f"localStorage.setItem('prefect-password', '{password}')")
        for name, (address, width, height) in pages.items():
            page.set_viewport_size({"width": width, "height": height})
            page.goto(address)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(SETTLE_MS)
            keep(page.screenshot(), IMAGES / name)


def _ask(password: str, url: str, query: dict[str, Any] | None = None) -> Any:
    data = None if query is None else json.dumps(query).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", "Authorization": f"Basic {password}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
