"""Take the pictures of Prefect's pages in docs/images/ with headless Chromium, from a server that `fp8-grpo up` runs.

    python docs/screenshots_prefect.py http://127.0.0.1:4200

It shows the run of `fp8-grpo/tiny` that ended last, and the form that starts one. A short run makes a readable picture:

    prefect deployment run fp8-grpo/tiny --watch --param steps=4
"""

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
# Pages fetch what they show; their time passes as fast as they can take it.
_PAGE_MILLISECONDS = 60_000


def main(server: str) -> None:
    deployment = _ask(f"{server}/api/deployments/name/fp8-grpo/tiny")["id"]
    query = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    (run,) = _ask(f"{server}/api/flow_runs/filter", query)
    _take(f"{server}/runs/flow-run/{run['id']}", "prefect-run.png", "1400,1000")
    _take(f"{server}/deployments/deployment/{deployment}/run", "prefect-form.png", "1200,1150")


def _ask(url: str, query: dict[str, Any] | None = None) -> Any:
    data = None if query is None else json.dumps(query).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _take(url: str, name: str, size: str) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("neither chromium nor google-chrome is installed")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-prefers-reduced-motion"]
    timing = [f"--window-size={size}", f"--virtual-time-budget={_PAGE_MILLISECONDS}"]
    picture = f"--screenshot={IMAGES / name}"
    subprocess.run([browser, *options, *timing, picture, url], check=True, capture_output=True, timeout=300)
    print(IMAGES / name)


if __name__ == "__main__":
    main(sys.argv[1])
