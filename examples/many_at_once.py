"""Many requests at once: python examples/many_at_once.py [HOW_MANY]."""

import asyncio
import sys

from splitwise.client import AsyncClient
from splitwise.errors import RemoteError


async def ask(client: AsyncClient, number: int) -> str:
    """Return one answer, or the kind of error that it met."""
    try:
        stream = client.generate(f"Write the number {number} as a word:", max_tokens=8, timeout=60)
        return (await stream.result()).text
    except RemoteError as error:
        return f"{type(error).__name__}: {error}"


async def main() -> None:
    """Send all requests together and print the answers in order."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    async with AsyncClient() as client:
        for number, text in enumerate(await asyncio.gather(*[ask(client, n) for n in range(count)])):
            print(f"{number}: {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
