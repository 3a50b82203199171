"""Turn a GGUF file of a Llama model into a Hugging Face folder: ``python -m splitwise.models.convert``.

Weights are dequantized to float32 and stored as bfloat16, in which the original model was
published. One line on stdout per step.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Read `source`, write config, weights, tokenizer and chat template into `folder`."""
    _say("loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place, name = str(source.parent), source.name
    # stderr is for failures: transformers draws progress bars there.
    with contextlib.redirect_stderr(io.StringIO()):
        _say(f"reading {name} ({source.stat().st_size >> 20} MB, 4 bits per weight)")
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        quantized = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        _say("dequantizing")
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = "bfloat16"
        # A model built from the plain configuration: the loaded one keeps the quantizer's hooks.
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.generation_config = quantized.generation_config
        # What the model card's own example samples with; a model this small drifts off at 1.
        model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
        _say("writing the model folder")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
