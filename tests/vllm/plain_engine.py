"""One vLLM engine as anyone would run it: a request as a line of JSON in, its token ids as a line out.

Started with the arguments of vLLM's ``LLM`` as JSON; ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    # An engine that the test's own process ran has set it to a folder that may be gone.
    os.environ.pop("VLLM_RPC_BASE_PATH", None)
    from vllm import LLM, SamplingParams

    engine = LLM(enforce_eager=True, enable_prefix_caching=False, **json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        wanted = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **request["sampling"]}
        bias = {int(token): value for token, value in wanted.pop("logit_bias", {}).items()}
        sampling = SamplingParams(**wanted, logit_bias=bias or None)
        (output,) = engine.generate({"prompt_token_ids": request["tokens"]}, sampling, use_tqdm=False)
        print(json.dumps({"answer": list(output.outputs[0].token_ids)}), flush=True)


if __name__ == "__main__":
    main()
