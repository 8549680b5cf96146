"""Record a run and draw each panel of the chart's dashboards from it, as Grafana would.

    make dashboards                  a picture of each panel in .cache/dashboards/pictures
    make dashboards ONLY=kv-cache    those with this in their name
    make dashboards RECORD=1         a new recording first: six minutes, and no root
    make dashboards DOCS=1           the pictures of docs/operate/dashboards, too

The first run records, and downloads Grafana's components and a browser.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys

from localkube import ClusterError
from localkube.home import REPOSITORY, cache

from .episodes import record_run
from .pictures import draw_panels

IN_DOCS = REPOSITORY / "docs" / "operate" / "dashboards"


def main() -> None:
    parser = argparse.ArgumentParser(prog="dashboards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    recording = cache() / "dashboards" / "recording"
    parser.add_argument("--only", help="part of the pictures' names")
    parser.add_argument("--record", action="store_true", help="record again")
    parser.add_argument("--docs", action="store_true", help="replace the pictures of the docs")
    options = parser.parse_args()
    if options.record or not (recording / "recorded.json").exists():
        shutil.rmtree(recording, ignore_errors=True)
        recording.mkdir(parents=True)
        asyncio.run(record_run(recording))
    for picture in draw_panels(recording, recording.with_name("pictures"), options.only):
        if options.docs and (IN_DOCS / picture.name).exists():
            shutil.copy(picture, IN_DOCS)


if __name__ == "__main__":
    try:
        main()
    # An assertion: waited in vain.
    except (ClusterError, AssertionError, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {error}")
