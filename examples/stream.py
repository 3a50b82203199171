"""One prompt, streamed: python examples/stream.py "Once upon a time"."""

import sys

from splitwise.client import Client


def main() -> None:
    """Print the text as it arrives, then the request's figures."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The two phases of a language model are"
    with Client() as client:  # the cluster that `splitwise up` runs; or Client("host:port")
        stream = client.generate(prompt, max_tokens=48, temperature=0)
        for piece in stream:
            print(piece, end="", flush=True)
        answer = stream.result()
    print(f"\n\nran on {answer.placement}")
    print(f"timing {answer.timing}")
    print(f"hand-over {answer.transfer}")


if __name__ == "__main__":
    main()
