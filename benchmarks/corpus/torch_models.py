"""Torch models of the corpus: name, family, how to build it, inputs. Small shapes of what `transformers` and `timm` list."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.corpus import more_networks, networks
from benchmarks.corpus.inputs import MakeFeed, adjacency, edges, integers, joined, normal, ones, pixels, tokens
from benchmarks.zoo.wheels import ZooUnavailable

Build = Callable[[], torch.nn.Module]


@dataclass(frozen=True, slots=True)
class TorchModel:
    """One row of the table."""

    name: str
    family: str
    build: Build
    feed: MakeFeed
    exported: bool = True
    """Whether its ONNX export is an entry too."""


def _seeded(make: Build) -> Build:
    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().eval()

    return build


def _name_torchvision_operators() -> None:
    """Torchvision's operator library does not load beside a CPU build of torch; its import needs these names only."""
    if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _transformers(model: str, config: str, part: str = "", **options: Any) -> Build:
    """`model(config(**options))`, or a part of it by attribute names."""

    def make() -> torch.nn.Module:
        _name_torchvision_operators()
        try:
            import transformers
        except ImportError as e:
            raise ZooUnavailable("transformers is not installed", because=str(e), hint="pip install hotfuse[bench]") from e
        found: Any = getattr(transformers, model)(getattr(transformers, config)(**options))
        for name in filter(None, part.split(".")):
            found = getattr(found, name)
        return found

    return _seeded(make)


def _timm(name: str, **options: Any) -> Build:
    def make() -> torch.nn.Module:
        _name_torchvision_operators()
        try:
            import timm
        except (ImportError, RuntimeError) as e:
            hint = "pip install --no-deps -r benchmarks/corpus/requirements.txt"
            raise ZooUnavailable("timm is not installed", because=str(e), hint=hint) from e
        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return _seeded(make)


def _of(kind: str, **options: Any) -> Build:
    return _seeded(lambda: getattr(networks if hasattr(networks, kind) else more_networks, kind)(**options))


_SMALL = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256)
_TEXT = _SMALL | dict(vocab_size=2000, max_position_embeddings=256)
_DECODER = _TEXT | dict(num_key_value_heads=2, use_cache=False)
_AUDIO = _SMALL | dict(conv_dim=[64] * 7, num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4, vocab_size=32)
_SERIES = dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
               encoder_ffn_dim=64, decoder_ffn_dim=64)
_IDS, _PLAIN = tokens(2000, 1, 64), tokens(2000, 1, 64, mask=False)




TORCH_MODELS: tuple[TorchModel, ...] = (
    # --- text
    TorchModel("bert", "text", _transformers("BertModel", "BertConfig", **_TEXT), _IDS),
    TorchModel("albert", "text", _transformers("AlbertModel", "AlbertConfig", embedding_size=64, **_TEXT), _IDS),
    TorchModel("electra", "text", _transformers("ElectraModel", "ElectraConfig", embedding_size=64, **_TEXT), _IDS),
    TorchModel("mpnet", "text", _transformers("MPNetModel", "MPNetConfig", **_TEXT), _IDS),
    TorchModel("deberta", "text", _transformers("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], **_TEXT), _IDS, False),
    TorchModel("fnet", "text", _transformers("FNetModel", "FNetConfig", **_TEXT), _PLAIN, False),
    TorchModel("t5-encoder", "text", _transformers("T5EncoderModel", "T5Config", vocab_size=2000, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4), _IDS),
    TorchModel("gpt2", "text", _transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=2000, n_embd=128, n_layer=3, n_head=4, use_cache=False), _IDS),
    TorchModel("gpt-neox", "text", _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", use_cache=False, **_TEXT), _PLAIN),
    TorchModel("bloom", "text", _transformers("BloomForCausalLM", "BloomConfig", vocab_size=2000, hidden_size=128, n_layer=3, n_head=4, use_cache=False), _IDS, False),
    TorchModel("opt", "text", _transformers("OPTForCausalLM", "OPTConfig", vocab_size=2000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, ffn_dim=256, word_embed_proj_dim=128, max_position_embeddings=256, use_cache=False), _IDS, False),
    TorchModel("llama", "text", _transformers("LlamaForCausalLM", "LlamaConfig", **_DECODER), _PLAIN),
    TorchModel("qwen2", "text", _transformers("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), _PLAIN, False),
    TorchModel("gemma2", "text", _transformers("Gemma2ForCausalLM", "Gemma2Config", head_dim=32, **_DECODER), _PLAIN, False),
    TorchModel("bart", "text", _transformers("BartModel", "BartConfig", vocab_size=2000, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=256, use_cache=False), _IDS, False),
    # --- mixtures
    TorchModel("mixtral", "mixtures", _transformers("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_DECODER), _PLAIN, False),
    TorchModel("qwen2-moe", "mixtures", _transformers("Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128, **_DECODER), _PLAIN, False),
    # --- state-space models
    TorchModel("mamba", "state space", _transformers("MambaForCausalLM", "MambaConfig", vocab_size=2000, hidden_size=64, state_size=8, num_hidden_layers=2, use_cache=False), tokens(2000, 1, 32, mask=False), False),
    TorchModel("rwkv", "state space", _transformers("RwkvForCausalLM", "RwkvConfig", vocab_size=2000, hidden_size=64, num_hidden_layers=2, context_length=64, use_cache=False), tokens(2000, 1, 32, mask=False), False),
    TorchModel("selective-scan", "state space", _of("SelectiveScan"), normal(x=(1, 32, 64))),
    TorchModel("long-convolution", "state space", _of("LongConvolution"), normal(x=(1, 256, 64)), False),
    # --- classification
    TorchModel("vit", "classification", _transformers("ViTForImageClassification", "ViTConfig", image_size=96, **_SMALL), pixels(1, 96)),
    TorchModel("swin", "classification", _transformers("SwinForImageClassification", "SwinConfig", image_size=112, embed_dim=48, depths=[1, 1, 2], num_heads=[2, 4, 8]), pixels(1, 112)),
    TorchModel("convnext", "classification", _transformers("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[32, 64, 128, 192], depths=[1, 1, 2, 1]), pixels(1, 96)),
    TorchModel("mobilevit", "classification", _transformers("MobileViTForImageClassification", "MobileViTConfig", hidden_sizes=[48, 64, 80], neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 160], image_size=96), pixels(1, 96), False),
    TorchModel("levit", "classification", _transformers("LevitForImageClassification", "LevitConfig", image_size=96, hidden_sizes=[64, 96, 128], num_attention_heads=[2, 3, 4], depths=[1, 1, 1]), pixels(1, 96), False),
    TorchModel("mobilenetv3", "classification", _timm("mobilenetv3_small_100"), pixels(1, 128, "x")),
    TorchModel("efficientnet", "classification", _timm("efficientnet_b0"), pixels(1, 128, "x")),
    TorchModel("resnet18", "classification", _timm("resnet18"), pixels(1, 128, "x")),
    TorchModel("resnext", "classification", _timm("resnext26ts"), pixels(1, 128, "x"), False),
    TorchModel("regnet", "classification", _timm("regnety_002"), pixels(1, 128, "x")),
    TorchModel("densenet", "classification", _timm("densenet121"), pixels(1, 96, "x"), False),
    TorchModel("ghostnet", "classification", _timm("ghostnet_100"), pixels(1, 128, "x"), False),
    TorchModel("mixer", "classification", _timm("mixer_s32_224", img_size=96), pixels(1, 96, "x")),
    TorchModel("poolformer", "classification", _timm("poolformer_s12"), pixels(1, 96, "x"), False),
    TorchModel("repvgg", "classification", _timm("repvgg_a0"), pixels(1, 96, "x"), False),
    TorchModel("inception", "classification", _timm("inception_v3"), pixels(1, 128, "x"), False),
    TorchModel("mnasnet", "classification", _timm("mnasnet_small"), pixels(1, 128, "x"), False),
    TorchModel("coatnet", "classification", _timm("coatnet_pico_rw_224", img_size=96), pixels(1, 96, "x"), False),
    # --- detection
    TorchModel("yolos", "detection", _transformers("YolosForObjectDetection", "YolosConfig", image_size=[96, 96], num_detection_tokens=20, **_SMALL), pixels(1, 96), False),
    TorchModel("yolo8", "detection", _of("Detector"), pixels(1, 160, "x")),
    TorchModel("owlvit-vision", "detection", _transformers("OwlViTVisionModel", "OwlViTVisionConfig", image_size=96, patch_size=16, **_SMALL), pixels(1, 96), False),
    # --- segmentation and depth
    TorchModel("segformer", "segmentation", _transformers("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], decoder_hidden_size=64, num_labels=8), pixels(1, 128)),
    TorchModel("unet", "segmentation", _of("UNet"), pixels(1, 96, "x")),
    TorchModel("dpt", "segmentation", _transformers("DPTForDepthEstimation", "DPTConfig", image_size=96, patch_size=16, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 32, 64, 64], fusion_hidden_size=32, **_SMALL | dict(num_hidden_layers=4)), pixels(1, 96), False),
    TorchModel("hrnet", "segmentation", _timm("hrnet_w18_small"), pixels(1, 96, "x"), False),
    # --- super-resolution
    TorchModel("edsr", "super-resolution", _of("SuperResolution"), pixels(1, 48, "x")),
    TorchModel("swin2sr", "super-resolution", _transformers("Swin2SRForImageSuperResolution", "Swin2SRConfig", image_size=32, embed_dim=32, depths=[2, 2], num_heads=[2, 2], window_size=8, upscale=2), pixels(1, 32), False),
    # --- speech and audio
    TorchModel("wav2vec2", "speech", _transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", **_AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("hubert", "speech", _transformers("HubertModel", "HubertConfig", **_AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("whisper-encoder", "speech", _transformers("WhisperModel", "WhisperConfig", "encoder", d_model=128, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=100), normal(input_features=(1, 80, 200))),
    TorchModel("quartznet", "speech", _of("Separable"), normal(x=(1, 64, 200))),
    TorchModel("pitch", "audio", _of("Pitch"), normal(x=(4, 1024))),
    TorchModel("wavenet", "audio", _of("WaveNet"), normal(x=(1, 1, 1024))),
    TorchModel("ast", "audio", _transformers("ASTForAudioClassification", "ASTConfig", max_length=128, num_mel_bins=64, **_SMALL), normal(input_values=(1, 128, 64))),
    TorchModel("encodec", "audio", _transformers("EncodecModel", "EncodecConfig", "encoder", num_filters=8, hidden_size=32), normal(hidden_states=(1, 1, 3200)), False),
    # --- time series
    TorchModel("patchtst", "time series", _transformers("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=4, context_length=96, prediction_length=24, d_model=64, num_attention_heads=4, ffn_dim=128, num_hidden_layers=2), normal(past_values=(2, 96, 4)), False),
    TorchModel("tsmixer", "time series", _transformers("PatchTSMixerForPrediction", "PatchTSMixerConfig", num_input_channels=4, context_length=96, prediction_length=24, patch_length=8, patch_stride=8, d_model=32, num_layers=3), normal(past_values=(2, 96, 4)), False),
    TorchModel("autoformer", "time series", _transformers("AutoformerForPrediction", "AutoformerConfig", "model.encoder", prediction_length=24, context_length=48, **_SERIES), normal(inputs_embeds=(2, 48, 9)), False),
    TorchModel("lstm", "time series", _of("Recurrent"), normal(x=(1, 32, 32))),
    TorchModel("deepar", "time series", _of("Forecast"), normal(x=(2, 48, 4))),
    TorchModel("nbeats", "time series", _of("NBeats"), normal(x=(8, 96))),
    # --- graphs, recommenders
    TorchModel("gcn", "graphs", _of("GraphConvolutions"), adjacency(200, 64)),
    TorchModel("gat", "graphs", _of("GraphAttention"), edges(200, 64, 1600), False),
    TorchModel("dlrm", "recommenders", _of("Recommender"), joined(normal(dense=(16, 13)), lambda rng: {"ids": torch.randint(0, 1000, (16, 8, 4), generator=rng)}), False),
    # --- what papers' code has besides layers
    TorchModel("gated-unet", "segmentation", _of("GatedUNet"), pixels(1, 96, "x")),
    TorchModel("global-response", "classification", _of("GlobalResponse"), pixels(1, 96, "x")),
    TorchModel("channel-shuffle", "classification", _of("ChannelShuffle"), pixels(2, 96, "x")),
    TorchModel("fourier-operator", "operators", _of("FourierOperator"), normal(x=(1, 1, 48, 48)), False),
    TorchModel("neighbour-graph", "graphs", _of("NeighbourGraph"), normal(x=(2, 3, 256)), False),
    TorchModel("message-passing", "graphs", _of("MessagePassing"), joined(edges(400, 32, 3000), integers(graph=(16, (400,)))), False),
    TorchModel("modulated", "generation", _of("ModulatedConvolution"), normal(z=(2, 64)), False),
    TorchModel("translator", "text", _of("Translator"), integers(source=(500, (2, 20))), False),
    TorchModel("packed-tagger", "text", _of("PackedTagger"), joined(normal(x=(4, 30, 24)), lambda _rng: {"lengths": torch.tensor([9, 30, 17, 22])}), False),
    TorchModel("capsules", "classification", _of("Capsules"), normal(x=(4, 1, 28, 28))),
    TorchModel("splines", "plain", _of("Splines"), normal(x=(64, 16))),
    TorchModel("suppression", "detection", _of("Suppression"), normal(boxes=(100, 4), logits=(100, 10)), False),
    TorchModel("spectral-mask", "audio", _of("SpectralMask"), normal(x=(1, 8000)), False),
    # --- vision and language
    TorchModel("clip-text", "text", _transformers("CLIPTextModel", "CLIPTextConfig", bos_token_id=0, eos_token_id=2, **_TEXT), _IDS, False),
    TorchModel("vilt", "multimodal", _transformers("ViltModel", "ViltConfig", image_size=64, patch_size=16, max_image_length=-1, **_TEXT), joined(tokens(2000, 1, 16), pixels(1, 64), ones(torch.int64, pixel_mask=(1, 64, 64))), False),
    # --- plain ones
    TorchModel("mlp", "plain", _of("Mlp"), normal(x=(1, 256))),
    TorchModel("cnn", "plain", _of("Cnn"), pixels(1, 64, "x")),
)  # fmt: skip
