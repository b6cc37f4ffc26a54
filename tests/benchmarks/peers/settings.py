"""The settings of the peers: setting -> the options that the module of the peer reads."""

from typing import Any

_GPTQ: dict[str, Any] = {"GPTQModifier": {}}


def _spinquant(*rotations: str) -> dict[str, Any]:
    # of the transforms, random-hadamard alone takes widths that are no power of two
    return {"SpinQuantModifier": {"rotations": rotations, "transform_type": "random-hadamard"}}


#: options of llm-compressor: modifiers and their arguments, in this order
LLM_COMPRESSOR = {
    "GPTQ": _GPTQ,
    "SmoothQuant + GPTQ": {"SmoothQuantModifier": {"smoothing_strength": 0.5}, **_GPTQ},
    "QuIP + GPTQ": {"QuIPModifier": {"rotations": ["v"], "transform_block_size": 32}, **_GPTQ},
    "SpinQuant R1, R2 + GPTQ": {**_spinquant("R1", "R2"), **_GPTQ},
    "SpinQuant R1 to R4 + GPTQ": {**_spinquant("R1", "R2", "R3", "R4"), **_GPTQ},
    "AWQ": {"AWQModifier": {}, "QuantizationModifier": {}},
}
AUTO_ROUND = {
    "200 iterations": {"iters": 200},
    "1000 iterations": {"iters": 1000},
    "alg_ext": {"iters": 200, "enable_alg_ext": True},
    "hadamard": {"iters": 200, "rotation_config": "hadamard"},
    "SpinQuant": {"iters": 200, "alg_configs": "spinquant,signround"},
}
#: options of Brevitas' program, as in its papers on Qronos and learned rounding
_BLOCKS = {"gpxq_block_name": "model.layers"}
_GPXQ = {**_BLOCKS, "gpxq_act_order": True, "weight_param_method": "mse"}
_BREVITAS_GPTQ = {**_GPXQ, "gptq": True}
_BREVITAS_QRONOS = {**_GPXQ, "qronos": True, "qronos_alpha": 1e-3}
_BREVITAS_LEARNED = {
    **_BLOCKS,
    "learned_round": "identity",
    "learned_round_fast_update": True,
    "learned_round_iters": 500,
    "learned_round_scale": True,
    "learned_round_scale_lr": 1e-3,
    "learned_round_scale_momentum": 0.1,
    "scaling_min_val": 1e-4,
}
_FUSED = {
    "rotation": "fused_no_fx",
    "replace_rmsnorm": True,
    "rotation_orphan_sink": True,
    "rotation_sdpa_regions": True,
}
BREVITAS = {
    "GPTQ": _BREVITAS_GPTQ,
    "Qronos": _BREVITAS_QRONOS,
    "learned round": _BREVITAS_LEARNED,
    "rotations + GPTQ": {**_FUSED, **_BREVITAS_GPTQ},
    "rotations + Qronos": {**_FUSED, **_BREVITAS_QRONOS},
    "rotations + learned round": {**_FUSED, **_BREVITAS_LEARNED},
    "rotations of layers + learned round": {"rotation": "layerwise", **_BREVITAS_LEARNED},
}
#: options of Quark: algorithms and what differs from its defaults for a model, in this order
_OFFLINE = {"rotation": {"r1": True, "r2": True}}
_ONLINE = {"rotation": {"r1": True, "r2": True, "r4": True, "online_r1_rotation": True, "rotation_size": 32}}
QUARK: dict[str, Any] = {
    "GPTQ": {"gptq": {}},
    "GPTAQ": {"gptaq": {}},
    "Qronos": {"qronos": {}},
    "rotations + GPTQ": {**_OFFLINE, "gptq": {}},
    "online rotations + GPTQ": {**_ONLINE, "gptq": {}},
    "online rotations + GPTAQ": {**_ONLINE, "gptaq": {}},
    "online rotations + Qronos": {**_ONLINE, "qronos": {}},
}
#: options of Brevitas on images; its best results on MobileNet V2 have GPTQ and corrected biases
BREVITAS_IMAGES: dict[str, Any] = {
    "nearest": {},
    "GPTQ": {"algorithm": "GPTQ"},
    "GPTQ + bias correction": {"algorithm": "GPTQ", "bias_correction": True},
    "Qronos": {"algorithm": "Qronos"},
}
#: options of Quark on ONNX files: the classes of its algorithms and their arguments; the defaults take long on a CPU
QUARK_ONNX: dict[str, Any] = {
    "nearest": {},
    "bias correction": {"BiasCorrectionConfig": {}},
    "AdaQuant": {"AdaQuantConfig": {}},
    "AdaQuant, 16 images": {
        "AdaQuantConfig": {"batch_size": 2, "num_iterations": 200, "learning_rate": 1e-4, "data_size": 16}
    },
    "AdaRound": {"AdaRoundConfig": {"num_iterations": 10, "data_size": 2}},  # enough to reach what it refuses
}
NNCF_WEIGHTS = {
    "GPTQ": {"gptq": True},
    "AWQ": {"awq": True},
    "scale estimation": {"scale_estimation": True},
    "AWQ + scale estimation": {"awq": True, "scale_estimation": True},
}
TORCHAO = {mode: {"scale_mode": mode} for mode in ("even", "floor", "rceil")}
