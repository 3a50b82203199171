"""Through the OpenAI client: python examples/openai_client.py (needs `pip install openai`)."""

import sys

from openai import OpenAI


def main() -> None:
    """Stream a chat answer from the gateway."""
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=base, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Say hello in three languages."}]
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=48, stream=True):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
