"""Take a picture of a running router's dashboard: ``python tools/dashboard_screenshot.py URL FILE``.

Needs Chromium (on Debian: ``apt-get install chromium``). The README's picture is made by
``readme_picture.py``, which starts a cluster of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.browser import start_browser

MACHINES_SHOWN = "document.querySelectorAll('.machine').length"
PICK = "document.querySelector('#timeline').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"


async def take(arguments: argparse.Namespace) -> None:
    """Open the page, let it watch the cluster for a while, and write the picture."""
    with tempfile.TemporaryDirectory() as profile:
        async with start_browser(Path(profile)) as browser:
            page = f"{arguments.url.rstrip('/')}/dashboard"
            await browser.open(page, width=arguments.width, height=arguments.height, dark=arguments.dark)
            if arguments.key:
                await browser.evaluate(f"sessionStorage.setItem('key', {json.dumps(arguments.key)})")
            await browser.until(MACHINES_SHOWN)
            await asyncio.sleep(arguments.after)
            if arguments.pick:
                await browser.evaluate(PICK)
                await browser.until("!!document.querySelector('#detail table')")
            await browser.screenshot(arguments.file)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("file", type=Path, help="PNG to write")
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--after", type=float, default=2.0, help="seconds to watch before the picture")
    parser.add_argument("--pick", action="store_true", help="show the details of the last request")
    parser.add_argument("--key", help="API key of the router")
    asyncio.run(take(parser.parse_args()))


if __name__ == "__main__":
    main()
