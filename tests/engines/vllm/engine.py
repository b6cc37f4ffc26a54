"""vLLM on checkpoints: `python -m tests.engines.vllm.engine RANKS FOLDER...` writes the result of each.

A process of its own, because what an engine leaves behind in one that failed may end it.
"""

import enum
import gc
import json
import os
import sys
import traceback
from pathlib import Path

#: what makes vLLM run in this process, without a network, and lets it say what its layers call
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
#: small, without graphs of CUDA; attention in Triton, which needs no other library
_OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
    "attention_backend": "TRITON_ATTN",
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def run(place: Path, ranks: int) -> None:
    """Write whether vLLM loads a checkpoint, with the kernels and the log-probabilities of texts or the reason."""
    import torch

    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    texts = json.loads((place / "made.json").read_text())["texts"]
    engine = None
    try:
        engine = LLM(str(place / "checkpoint"), tensor_parallel_size=ranks, **_OPTIONS)
        scores = _scores(engine, texts)
        result = {"loads": True, "kernels": engine.apply_model(kernels)[0], "scores": scores}
    except Exception as error:  # whatever an engine raises is the result
        result = {"loads": False, "reason": _reason(error)}
    result_file(place, ranks).write_text(json.dumps(result))  # before the end, which may take its time
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()
    del engine
    if ranks == 1:  # others had their memory and groups in processes of their own
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def _scores(engine, texts: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of the texts but the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    return [
        [logs[token].logprob for logs, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
        for output, text in zip(outputs, texts, strict=True)
    ]


def kernels(model) -> list[str]:
    """Return the kernels of the layers of a model, by the names that its quantization methods give."""
    names = set()
    for layer in model.modules():
        for owner in filter(None, (getattr(layer, "quant_method", None), getattr(layer, "scheme", None))):
            for name, value in vars(owner).items():
                if name in ("kernel", "fp8_linear"):
                    names.add(type(value).__name__.removesuffix("LinearKernel"))
                elif name.endswith("_backend") and isinstance(value, enum.Enum):
                    names.add(f"experts {value.name}")
                elif name == "emulate" and value:
                    names.add("emulated")
    return sorted(names)


def _reason(error: BaseException) -> str:
    """Return the first sentence of the error that began it; of one without words, the line of code."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {text.splitlines()[0].partition('. ')[0]}"


def result_file(place: Path, ranks: int) -> Path:
    """Return the file of what `run` gives for a checkpoint."""
    return place / f"vllm-{ranks}.json"


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    for folder in sys.argv[2:]:
        run(Path(folder), int(sys.argv[1]))
