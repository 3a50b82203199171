"""One vLLM engine as anyone would run it: a job as JSON on stdin, token ids as JSON on the last line."""

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
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    engine = LLM(model=job["model"], enforce_eager=True, enable_prefix_caching=False, **job["arguments"])
    answers = []
    for request in job["requests"]:
        wanted = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **request["sampling"]}
        bias = {int(token): value for token, value in wanted.pop("logit_bias", {}).items()}
        sampling = SamplingParams(**wanted, logit_bias=bias or None)
        (output,) = engine.generate({"prompt_token_ids": request["tokens"]}, sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    print()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
