"""The norms of known source: their forms, and the fingerprints of their statement trees.

``python -m normops.adoption.fingerprints`` prints new rows. The properties of each form are measured.
"""

import torch

from normops.adoption.norm import Dtypes, Form, Gating, Order, OutputDtype, Roundings, Saved
from normops.functional import Activation

LETTERS = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32, "d": torch.float64}


def _form(
    output: OutputDtype,
    rounds: Roundings,
    saves: str,
    *,
    excludes: str = "",
    offset: float = 0.0,
    eps: float | str | None = None,
    dim: int | None = None,
    gate: tuple[Activation, bool] | None = None,
    order: Order = "kept",
    autocasts: bool = False,
    dims: tuple[int, ...] | None = None,
) -> Form:
    """Returns a form, whose arguments Form describes.

    ``saves`` has groups of dtypes of input and weight, tensors that require a gradient, and the saved tensor's index:
    "bb,ff 100,110 0" describes four cases. ``excludes`` has dtypes of input, weight and gate.
    """
    found = set()
    for group in filter(None, saves.split("; ")):
        pairs, patterns, tensor = group.split()
        for pair, pattern in ((p, q) for p in pairs.split(",") for q in patterns.split(",")):
            requires = tuple(flag == "1" for flag in pattern)
            found.add(Saved(LETTERS[pair[0]], LETTERS[pair[1]], requires, int(tensor)))
    left_out: set[Dtypes] = set()
    for each in excludes.split():
        left_out.add((LETTERS[each[0]], LETTERS.get(each[1]), LETTERS.get(each[2])))
    gating = None if gate is None else Gating(*gate)
    at_last = (dims, frozenset(left_out), frozenset(found))
    return Form(offset, eps, dim, gating, output, rounds, order, autocasts, *at_last)  # type: ignore[arg-type]


FORMS: dict[str, Form] = {
    "torch": _form("input's", "once", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0", order="contiguous", autocasts=True),
    "torch, no weight": _form("input's", "once", "ff 100 0", order="contiguous", autocasts=True),
    "Mochi": _form("input's", "once", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1"),
    "diffusers, bias": _form("weight's, if it has 16 bits", "thrice", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1"),
    "T5": _form("weight's, if it has 16 bits", "twice", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1"),
    "Mochi, no weight": _form("input's", "once", "bb,ff 100 0"),
    "Krea 2": _form("input's", "otherwise", "fb,ff 100,110 0", offset=1.0, order="contiguous", autocasts=True),
    "Gemma": _form("input's", "once", "fb,ff 100,110 0", offset=1.0),
    "Helium": _form("input's", "once", "bf,ff 100,110 1; fb,ff 100,110 0"),
    "Stable Audio 3": _form("input's", "otherwise", "bb,bf,fb,ff 100,110 0; bb,ff 100,110 1", autocasts=True),
    "Wan, bias": _form("promoted", "thrice", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0", eps="normalize", dim=1),
    "Wan": _form("promoted", "twice", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0", eps="normalize", dim=1),
    "Wan, rows, bias": _form("promoted", "thrice", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0", eps="normalize"),
    "Wan, rows": _form("promoted", "twice", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0", eps="normalize"),
    "Llama": _form("promoted", "twice", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0"),
    "OLMo 2": _form("input's", "once", "bb,bf,fb,ff 100,110 1; fb,ff 100,110 0"),
    "Muse": _form("input's", "otherwise", "fb,ff 100,110 0", offset=1.0),
    "x-transformers": _form(
        "promoted", "otherwise", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1", eps="normalize", autocasts=True
    ),
    "F5-TTS": _form(
        "weight's, if it has 16 bits",
        "once",
        "bb,fb,ff 100,110 1; ff 100,110 0",
        excludes="bd- bf- fd- hd- hf-",
        order="contiguous",
        autocasts=True,
    ),
    "Kimi Linear": _form(
        "input's", "once", "bf,ff 100,101,110,111 1; ff 100,101,110,111 0", gate=("sigmoid", True), order="unknown"
    ),
    "Mamba 2": _form(
        "promoted",
        "twice",
        "bb,bf,ff 001,011,100,101,110,111 1; ff 001,011,101,111 0; ff 001,011,101,111 2",
        gate=("silu", False),
        order="unknown",
    ),
    "DeepSeek V4": _form("input's", "otherwise", "bb,ff 100 0"),
    "Llama 4, no weight": _form("input's", "once", "ff 100 0"),
    "Falcon-H1": _form(
        "input's",
        "once",
        "bb,bf,ff 100,101,110,111 1; ff 100,101,110,111 0; ff 001,011,101,111 2",
        gate=("silu", True),
        order="unknown",
        dims=(2, 3),
    ),
    "Falcon-H1, gate first": _form(
        "input's",
        "once",
        "bb,bf,ff 001,011,101,111 0; bb,bf,ff 001,011,100,101,110,111 1; ff 001,011,101,111 2",
        gate=("silu", False),
        order="unknown",
        dims=(2, 3),
    ),
    "Gradium": _form("promoted", "otherwise", "bb,bf,fb,ff 010,100,110 0; bb,bf,fb,ff 100,110 1", autocasts=True),
    "ImageGPT": _form("promoted", "otherwise", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1", autocasts=True),
    "Qwen3-Next": _form(
        "input's",
        "thrice",
        "bb,bf,ff 100,101,110,111 1; ff 100,101,110,111 0; ff 001,011,101,111 2",
        gate=("silu", True),
        order="unknown",
    ),
    "Qwen4, sigmoid": _form(
        "input's", "thrice", "bb,bf,ff 100,101,110,111 1; ff 100,101,110,111 0", gate=("sigmoid", True), order="unknown"
    ),
    "torch in float32": _form("input's", "once", "bf,ff 100,110 1; fb,ff 100,110 0", order="contiguous"),
    "torch in float32, no weight": _form("input's", "once", "ff 100 0", order="contiguous"),
    "timm, channels": _form(
        "promoted", "otherwise", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1", dim=1, autocasts=True, dims=(4,)
    ),
    "timm, channels, no weight": _form("input's", "otherwise", "bb,ff 100 0", dim=1, autocasts=True, dims=(3, 4, 5)),
    "timm, channels in float32": _form("input's", "once", "bf,ff 100,110 1; fb,ff 100,110 0", dim=1, dims=(4,)),
    "timm, channels in float32, no weight": _form("input's", "once", "ff 100 0", dim=1, dims=(3, 4, 5)),
    "CPM-Ant": _form("promoted", "twice", "bb,bf,fb,ff 100,110 0; bb,bf,fb,ff 100,110 1"),
}

TREES: dict[str, dict[str, str]] = {
    # RMSNorm (torch)
    "feee9ba250be4811": {
        "shape weight =None": "torch",
        "shape weight eps": "torch",
        "shape =None =None": "torch, no weight",
        "shape =None eps": "torch, no weight",
    },
    "7c19f78079b9ce3b": {"eps weight": "Mochi"},  # RMSNorm (diffusers)
    # RMSNorm (diffusers)
    "42828235eb171680": {
        "weight eps bias": "diffusers, bias",
        "weight eps =None": "T5",
        "=None eps =None": "Mochi, no weight",
    },
    "a1316baefcdae1a9": {"eps weight": "Mochi", "eps =None": "Mochi, no weight"},  # MochiRMSNorm (diffusers)
    "be690c62256a01ab": {"size weight eps": "Krea 2"},  # Krea2RMSNorm (diffusers)
    "8179a936b7d00235": {"eps weight": "T5"},  # IdeficsRMSNorm (transformers)
    "280a3f39b5b4aa1d": {"eps weight": "Gemma"},  # QwenImage21ZeroCenterRMSNorm (diffusers)
    "234e794162b7dae9": {"eps weight": "Helium"},  # Cosmos3NemotronRMSNorm (diffusers)
    # StableAudio3RMSNorm (diffusers)
    "d02e5b95c6587b0e": {"=True eps weight": "Helium", "=False eps weight": "Stable Audio 3"},
    # HunyuanVideo15RMS_norm (diffusers)
    "957b2e38146a7515": {
        "=True scale weight bias": "Wan, bias",
        "=True scale weight =0.0": "Wan",
        "=False scale weight bias": "Wan, rows, bias",
        "=False scale weight =0.0": "Wan, rows",
    },
    "25d9351da2795754": {"scale weight": "Wan"},  # Kandinsky6VAERMSNorm (diffusers)
    "8a55712e246418a5": {"weight eps": "Llama"},  # Llama4TextRMSNorm (transformers)
    "4f6bb14ce7729dd9": {"weight eps": "Llama"},  # MiniMind (public repositories)
    "83173e04eedc6308": {"weight eps": "OLMo 2"},  # MiniMindCast (public repositories)
    # LitGpt (public repositories)
    "6aa54fa27a1742d6": {"=-1 eps =True weight": "Muse", "=-1 eps =False weight": "Helium"},
    "8aea166d1eff595a": {"scale weight": "x-transformers"},  # XTransformers (public repositories)
    "594bc59f27331650": {"weight eps": "F5-TTS"},  # F5Tts (public repositories)
    "7c32b533dee7c333": {"eps weight": "OLMo 2"},  # AfmoeRMSNorm (transformers)
    "a5a82ab5ba4d88b2": {"eps weight": "Llama"},  # Llama, Qwen3 and 140 others (transformers)
    "6e8a917e0ebb6406": {"eps weight ='sigmoid'": "Kimi Linear"},  # BailingHybridRMSNormGated (transformers)
    "7209a9198b1147b3": {"group_size eps weight": "Mamba 2"},  # BambaRMSNormGated (transformers)
    "18389c4d754ed5ca": {"eps": "DeepSeek V4"},  # DeepseekV4UnweightedRMSNorm (transformers)
    "aca2251c62fdb8a7": {"eps": "Llama 4, no weight"},  # EsmFold2RMSNorm (transformers)
    # FalconH1RMSNormGated (transformers)
    "93af83d9848288c2": {"=True groups eps weight": "Falcon-H1", "=False groups eps weight": "Falcon-H1, gate first"},
    "167f64532a107d21": {"weight eps": "Gemma"},  # GemmaRMSNorm (torchtune)
    "6b9e170521c716f5": {"weight eps": "Gradium"},  # GradiumPhononTTSTimestepNorm (transformers)
    "8930390049e3b051": {"eps weight": "Helium"},  # HeliumRMSNorm (transformers)
    "82541b1c0f2a5c84": {"eps weight": "ImageGPT"},  # ImageGPTLayerNorm (transformers)
    "2a738344a348d470": {"weight eps": "Helium"},  # KyutaiSpeechToTextRMSNorm (transformers)
    "8f988e768721ed82": {"weight eps": "Muse"},  # MuseSparkTextCenteredRMSNorm (transformers)
    # OlmoHybridRMSNormGated (transformers), Qwen4ExpTextRMSNormGated (transformers)
    "819520ca8b7930e1": {"eps weight ='silu'": "Qwen3-Next", "eps weight ='sigmoid'": "Qwen4, sigmoid"},
    "7f3a6a46c3dd23c3": {"weight group_size eps": "Gemma"},  # Qwen4ExpTextRMSNorm (transformers)
    # RmsNorm (timm)
    "80878281a95efe95": {"=False shape weight eps": "torch", "=False shape =None eps": "torch, no weight"},
    # RmsNormFp32 (timm)
    "7c9faee71da852da": {"weight shape eps": "torch in float32", "=None shape eps": "torch in float32, no weight"},
    # RmsNorm2d (timm)
    "d8030e36626731f9": {
        "=False shape weight eps": "timm, channels",
        "=False shape =None eps": "timm, channels, no weight",
    },
    # RmsNorm2dFp32 (timm)
    "46c99dec5ba1bd0f": {
        "weight shape eps": "timm, channels in float32",
        "=None shape eps": "timm, channels in float32, no weight",
    },
    "8392f899ef0595dd": {"shape weight eps": "torch"},  # RMSNorm (torchtune)
    # Gemma4RMSNorm (transformers)
    "20952fac765233d0": {"=True weight eps": "Helium", "=False absent eps": "Llama 4, no weight"},
    "6e1844df1b95834f": {"size eps weight": "CPM-Ant"},  # CpmAntLayerNorm (transformers)
    "138853080b5f9a3b": {"=True eps weight =None": "Llama"},  # xLSTMRMSNorm (transformers)
    "f8c653b4a49e242c": {"=1 eps": "timm, channels, no weight"},  # LTX2AudioPixelNorm (diffusers)
}
"""The forms by fingerprint, and by the roles of the attributes that the forward reads.

"=True" is a value, "size" and "shape" are the weight's, "scale" is the root of its size, and "absent" is no attribute.
"""
