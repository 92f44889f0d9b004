"""Weights of torchvision and timm give the logits of the library's own loader, in each layout that it loads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.conftest import refusal
from tests.factories import train_settings
from train.models.inspection import head_names, in_modules
from train.models.registry import build_model
from train.models.weights import FittedWeights, fit_weights, load_weights, published_normalization
from train.models.weights_origin import WeightsOrigin

torchvision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
State = dict[str, Tensor]
Layout = Callable[[State], dict[str, Any]]

# Weights of 2.6 GB, which are in memory several times.
HUGE, HUGE_BYTES = ("regnet_y_128gf", "vit_h_14"), 24 << 30


def randomize(model: nn.Module) -> nn.Module:
    """Give each tensor random values of its own, and BatchNorm statistics as after a training."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.normal_(0, 0.1, generator=chance)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 1.5, generator=chance)
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(0, max(0.02, value[0].numel() ** -0.5), generator=chance)
            else:
                value.add_(torch.randn(value.shape, generator=chance), alpha=0.1)
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: these models are small, and threads of tests side by side wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes the most time: all values are overwritten."""
    for name in ("trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(nn.init, name, lambda value, *_, **__: nn.init.zeros_(value))


def images_of(shape: tuple[int, int, int]) -> Tensor:
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(2))


def normalized(images: Tensor, mean: Any, scale: Any) -> Tensor:
    return (images - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(scale).view(-1, 1, 1)


def loaded(name: str, weights: str, shape: tuple[int, int, int], classes: int) -> tuple[nn.Module, FittedWeights]:
    """Return the trainer's model with these weights."""
    settings = train_settings(model=name, weights=weights)
    torch.manual_seed(3)
    model = build_model(settings.network, shape, classes)
    fitted = load_weights(settings.network, model, shape, tuple(map(str, range(classes))))
    fitted.load_into(model)
    return model.eval(), fitted


def features_of(model: nn.Module, images: Tensor, heads: tuple[str, ...]) -> list[Tensor]:
    """Return what the heads get."""
    inputs: list[Tensor] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for name in heads
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return inputs


@torch.no_grad()
def check_same(name: str, weights: str, images: Tensor, theirs: nn.Module, adapted: Tensor | None = None) -> None:
    """Compare with the library's model: logits, then what a head of another size gets.

    `adapted` are the images as the library's model takes them, if its normalization is another one.
    """
    adapted = images if adapted is None else adapted
    wanted = theirs.eval()(adapted)
    assert wanted.std() > 1e-4
    shape, classes = tuple(images.shape[1:]), wanted.shape[1]
    model, fitted = loaded(name, weights, shape, classes)
    assert (fitted.new, fitted.unused) == ((), ())
    torch.testing.assert_close(model(images), wanted, rtol=1e-3, atol=1e-3 * float(wanted.std()))
    model, fitted = loaded(name, weights, shape, 7)
    assert fitted.new
    assert all(in_modules(one, head_names(model, 7)) for one in fitted.new)
    heads = tuple(dict.fromkeys(one.rpartition(".")[0] for one in fitted.new))
    wanted_features = features_of(theirs, adapted, heads)
    assert wanted_features
    for value, wanted in zip(features_of(model, images, heads), wanted_features, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-3 * float(wanted.std()))


def torchvision_names() -> list[str]:
    models = torchvision.models
    return [name for name in models.list_models(module=models) if len(models.get_model_weights(name))]


# What files of before torch 0.4.1 do not have.
COUNTER = "num_batches_tracked"
# What torchvision's own loaders rename.
OLD_TORCHVISION = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))([12]\.)"), r"\1.\2"),
    (re.compile(r"(encoder_layer_\d+\.mlp\.)0\."), r"\g<1>linear_1."),
    (re.compile(r"(encoder_layer_\d+\.mlp\.)3\."), r"\g<1>linear_2."),
)


def older(name: str) -> str:
    return next((new for pattern, text in OLD_TORCHVISION if (new := pattern.sub(text, name)) != name), name)


@pytest.mark.seconds
@pytest.mark.usefixtures("no_initialization")
@pytest.mark.slow_except("first")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"first {name}" if name in ("squeezenet1_1", "googlenet", "mobilenet_v3_small") else name)
        for name in torchvision_names()
    ],
)
def test_torchvision_model_gives_the_logits_of_its_loader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in HUGE and os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < HUGE_BYTES:
        pytest.skip(f"needs {HUGE_BYTES >> 30} GiB of free memory")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    entry = torchvision.models.get_model_weights(name).DEFAULT
    arguments: dict[str, Any] = {"image_size": entry.meta["min_size"][0]} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        arguments = {"aux_logits": True, "init_weights": False}
    state = randomize(torchvision.models.get_model(name, weights=None, **arguments)).state_dict()
    if not name.startswith("mnasnet"):  # its loader asks for a version; the others get a file from before versions
        state = {older(key): value for key, value in state.items() if not key.endswith(COUNTER)}
    path = tmp_path / "hub/checkpoints" / entry.url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    del state
    side = arguments.get("image_size") or (224 if name.startswith("maxvit") else 96)
    raw, preset = images_of((3, side, side)), entry.transforms()
    theirs = torchvision.models.get_model(name, weights=entry)
    mean, scale = published_normalization(name) or ((), ())
    check_same(name, "pretrained", normalized(raw, mean, scale), theirs, normalized(raw, preset.mean, preset.std))


def renamed(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> Layout:
    """Return a layout that renames tensors, rule by rule."""

    def rename(state: State) -> State:
        names = {}
        for name in state:
            names[name] = name
            for pattern, text in rules:
                names[name] = re.sub(pattern, text, names[name])
        return {names[name]: value for name, value in state.items()}

    return rename


def later(match: re.Match[str]) -> str:
    """Swin and its like had the convolution between two stages at the end of the first one."""
    return f"layers.{int(match[1]) - 1}.downsample"


SWIN = renamed((r"layers\.(\d)\.downsample", later), (r"^head\.fc\.", "head."))
CONVNEXT = renamed(
    (r"^head\.norm\.", "norm."), (r"^head\.fc\.", "head."), (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
    (r"^stem\.", "downsample_layers.0."), (r"\.blocks\.", "."), ("conv_dw", "dwconv"), (r"mlp\.fc", "pwconv"),
    (r"mlp\.grn\.bias", "grn.beta"), (r"mlp\.grn\.weight", "grn.gamma"),
)  # fmt: skip


def convnext(state: State) -> State:
    """Return Facebook's layout: MLPs are linear layers, and the normalization of responses has four dimensions."""
    return {
        name: value.flatten(1) if "pwconv.weight" in name.replace("1.", ".").replace("2.", ".") else
        value.view(1, 1, 1, -1) if "grn." in name else value
        for name, value in CONVNEXT(state).items()
    }  # fmt: skip


def with_buffers(*names: str, layout: Layout = dict) -> Layout:
    """Return a layout with indices that are no weights."""
    return lambda state: {"model": {**layout(state), **{name: torch.arange(4) for name in names}}}


# How those who trained them wrote the files that timm loads too, by the names of timm's models.
ORIGINAL: dict[str, Layout] = {
    "densenet121": lambda state: {older(name): value for name, value in state.items() if not name.endswith(COUNTER)},
    "vgg11": lambda state: {
        name: value.flatten(1) if re.match(r"classifier.*weight", name) else value
        for name, value in renamed(
            (r"pre_logits\.fc1", "classifier.0"), (r"pre_logits\.fc2", "classifier.3"), (r"head\.fc", "classifier.6")
        )(state).items()
    },
    "regnety_002": renamed(
        (r"^stem\.conv", "stem.0"), (r"^stem\.bn", "stem.1"), (r"^head\.fc", "fc"),
        (r"downsample\.conv", "proj.0"), (r"downsample\.bn", "proj.1"),
        (r"conv1\.conv", "f.a.0"), (r"conv1\.bn", "f.a.1"), (r"conv2\.conv", "f.b.0"), (r"conv2\.bn", "f.b.1"),
        (r"conv3\.conv", "f.c.0"), (r"conv3\.bn", "f.c.1"),
        (r"se\.fc1", "f.se.excitation.0"), (r"se\.fc2", "f.se.excitation.2"),
        (r"^s(\d)\.b(\d+)", lambda match: f"trunk_output.block{match[1]}.block{match[1]}-{int(match[2]) - 1}"),
    ),
    "deit_tiny_patch16_224": with_buffers(),
    "deit3_small_patch16_224": with_buffers(layout=renamed((r"\.ls(\d)\.gamma", r".gamma_\1"))),
    "beit_base_patch16_224": with_buffers("blocks.0.attn.relative_position_index"),
    "swin_tiny_patch4_window7_224": with_buffers("layers.0.blocks.1.attn_mask", layout=SWIN),
    "swinv2_tiny_window8_256": with_buffers("layers.0.blocks.1.attn_mask", layout=SWIN),
    "convnext_atto": lambda state: {"model": convnext(state)},
    "convnextv2_atto": lambda state: {"model": convnext(state)},
    "edgenext_xx_small": lambda state: {"state_dict": convnext(state)},
    "levit_128s": with_buffers("stages.0.blocks.0.attn.attention_bias_idxs"),
    "cait_xxs24_224": lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
    "pit_ti_224": renamed((r"transformers\.(\d)\.pool\.", lambda match: f"pools.{int(match[1]) - 1}.")),
    "coat_tiny": lambda state: {"model": {**state, "norm1.weight": torch.ones(64), "norm1.bias": torch.zeros(64)}},
    "crossvit_tiny_240": lambda state: {"model": renamed((r"^(pos_embed|cls_token)_", r"\1."))(state)},
    "poolformer_s12": renamed(
        (r"^stages\.(\d)\.downsample\.conv", lambda match: f"network.{2 * int(match[1]) - 1}.proj"),
        (r"^stages\.(\d)\.blocks", lambda match: f"network.{2 * int(match[1])}"),
        (r"layer_scale(\d)\.scale", r"layer_scale_\1"), (r"^stem\.conv", "patch_embed.proj"),
        (r"^head\.norm", "norm"), (r"^head\.fc", "head"),
    ),
    "pvt_v2_b0": renamed(
        (r"^patch_embed\.", "patch_embed1."),
        (r"^stages\.(\d)\.downsample", lambda match: f"patch_embed{int(match[1]) + 1}"),
        (r"^stages\.(\d)\.blocks", lambda match: f"block{int(match[1]) + 1}"),
        (r"^stages\.(\d)\.norm", lambda match: f"norm{int(match[1]) + 1}"), (r"\.dwconv\.", ".dwconv.dwconv."),
    ),
    "tiny_vit_5m_224": with_buffers("stages.1.blocks.0.attn.attention_bias_idxs"),
    "focalnet_tiny_srf": with_buffers(
        layout=renamed((r"^stem\.norm", "stem.norm"), (r"layers\.(\d)\.downsample", later), (r"^stem", "patch_embed"),
        (r"head\.fc", "head"))
    ),
    "davit_tiny": renamed(
        (r"head\.norm", "norms"), (r"head\.fc", "head"), (r"^stem\.", "stages.0.downsample."),
        (r"^stages\.(\d)\.blocks", r"main_blocks.\1"), (r"^stages\.(\d)\.downsample", r"patch_embeds.\1"),
        (r"(patch_embeds\.\d)\.conv", r"\1.proj"), ("cpe1", "cpe.0"), ("cpe2", "cpe.1"),
    ),
    "hiera_tiny_224": lambda state: {
        "model_state": renamed((r"head\.fc", "head.projection"), (r"head\.norm", "norm"))(state)
    },
    "sequencer2d_s": renamed(
        (r"^stages\.(\d)\.blocks", r"blocks.\1"),
        (r"^stages\.(\d)\.downsample\.down", lambda match: f"blocks.{int(match[1]) - 1}.3.down"), (r"head\.fc", "head"),
    ),
}  # fmt: skip
OTHERS = (
    *("resnet10t", "efficientnet_b0", "mobilenetv3_small_050", "mobilenetv4_conv_small_050"),
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "swinv2_cr_tiny_ns_224", "mixer_b16_224"),
    *("gmlp_s16_224", "caformer_s18", "twins_svt_small", "visformer_tiny", "volo_d1_224", "nest_tiny_jx"),
    *("efficientformer_l1", "mobilevit_xxs", "maxvit_rmlp_pico_rw_256", "coatnet_nano_rw_224", "hrnet_w18_small"),
    *("ghostnet_100", "dla46_c", "repvgg_a0", "inception_v3", "xception41p", "dpn68", "hardcorenas_a", "tresnet_m"),
    *("mambaout_femto", "fastvit_t8", "repvit_m0_9", "starnet_s1", "efficientvit_m0", "efficientvit_b0", "rdnet_tiny"),
    *("nextvit_small", "ese_vovnet19b_dw", "selecsls42b", "gernet_s", "nf_resnet50", "cspresnet50", "skresnet18"),
    *("resnetv2_50", "convit_tiny", "tf_efficientnetv2_b0", "swiftformer_xs", "inception_next_atto"),
    *("xcit_nano_12_p16_224", "resmlp_12_224", "tnt_s_patch16_224", "mvitv2_tiny"),
)

# timm interpolates their embeddings of places, or their biases between places.
RESIZED = (
    *("deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224"),
    *("swin_tiny_patch4_window7_224", "tnt_s_patch16_224", "mvitv2_tiny", "maxvit_rmlp_pico_rw_256"),
)


def publish(folder: Path, name: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a file where the client of Hugging Face keeps those that timm publishes, and keep it off the network."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    import timm

    cache = folder / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    for path, content in (("refs/main", "0" * 40), (f"snapshots/{'0' * 40}/config.json", "{}")):
        (cache / path).parent.mkdir(parents=True)
        (cache / path).write_text(content)
    save_file(state, cache / f"snapshots/{'0' * 40}/model.safetensors")


@pytest.mark.seconds
@pytest.mark.usefixtures("no_initialization")
@pytest.mark.slow_except("first")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"first {name}" if name in ("resnet10t", "pvt_v2_b0", "mobilenetv3_small_050") else name)
        for name in (*ORIGINAL, *OTHERS)
    ],
)
def test_timm_model_gives_the_logits_of_its_loader(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    source = randomize(timm.create_model(name))
    state = {key: value.contiguous().clone() for key, value in source.state_dict().items()}
    images = images_of(source.pretrained_cfg["input_size"])
    publish(tmp_path, name, state, monkeypatch)
    save_file(state, tmp_path / "model.safetensors")
    file = {"file": str(tmp_path / "model.safetensors")}
    theirs = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=file)
    check_same(f"timm:{name}", "pretrained", images, theirs)
    if layout := ORIGINAL.get(name):
        torch.save(layout(state), tmp_path / "original.pth")
        theirs = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "original.pth")}
        )
        check_same(f"timm:{name}", str(tmp_path / "original.pth"), images, theirs)


@pytest.mark.slow_except("vit_tiny")
@pytest.mark.parametrize("side", [64, 288])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", *RESIZED])
def test_embeddings_of_another_size_are_those_of_timm(name: str, side: int, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    arguments = {"depth": 1} if name == "vit_tiny_patch16_224" else {}
    torch.manual_seed(0)
    source = randomize(timm.create_model(name, **arguments))
    save_file({key: value.contiguous() for key, value in source.state_dict().items()}, tmp_path / "a.safetensors")
    file = {"file": str(tmp_path / "a.safetensors")}
    theirs = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=file, img_size=side, **arguments).eval()
    text = " ".join(f"{key}={value}" for key, value in arguments.items())
    settings = train_settings(model=f"timm:{name}", weights=file["file"], model_args=text)
    images, classes = images_of((3, side, side)), tuple(map(str, range(theirs.num_classes)))
    model = build_model(settings.network, (3, side, side), len(classes))
    load_weights(settings.network, model, (3, side, side), classes).load_into(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), theirs(images))


def test_embeddings_of_another_size_are_those_of_torchvision() -> None:
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    def small(side: int) -> nn.Module:
        return VisionTransformer(side, 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)

    state, model, theirs = randomize(small(32)).state_dict(), small(64), small(64)
    theirs.load_state_dict(interpolate_embeddings(64, 8, state.copy()))
    settings = train_settings(model="vit_b_32", weights="a.pth")
    fitted = fit_weights(settings.network, model, state, WeightsOrigin(), tuple("abcde"))
    fitted.load_into(model)
    assert fitted.describe() == f"{len(state)} tensors loaded; nothing is new"
    images = images_of((3, 64, 64))
    torch.testing.assert_close(model.eval()(images), theirs.eval()(images))


@pytest.mark.seconds
@pytest.mark.parametrize("of", ["mixer_s32_224", "mixer_s16_224"])
def test_weights_for_another_size_are_refused(of: str, tmp_path: Path) -> None:
    """The MLPs of a mixer are over all places of an image."""
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    save_file(timm.create_model(of, num_classes=5).state_dict(), tmp_path / "a.safetensors")
    settings = train_settings(model="timm:mixer_s32_224", weights=str(tmp_path / "a.safetensors"))
    model = build_model(settings.network, (3, 64, 64), 5)
    refusal(
        load_weights,
        settings.network,
        model,
        (3, 64, 64),
        tuple("abcde"),
        match=r"of another model than timm:mixer_s32_224: .* Set TRAIN_MODEL or TRAIN_IMAGE_SIZE=224 as it",
    )
