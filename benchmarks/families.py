"""Families of `transformers`, one tiny model of each with random weights: what people serve, and what `generate` is asked for.

A row names the class, how its configuration differs from the default one, what a call gets, and whether it generates. Nothing is
downloaded. `benchmarks.programs` serves all of them; the tests serve some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Feed = dict[str, torch.Tensor]
MakeFeed = Callable[[int], Feed]
"""Inputs of a call; the number is its length where that may vary."""
VOCABULARY = 99
WIDTH = 32


@dataclass(frozen=True, slots=True)
class Family:
    """One row."""

    name: str
    model: str
    options: dict[str, Any]
    feed: MakeFeed
    generates: bool = False

    def build(self) -> Any:
        """The model, in inference mode, the same weights every time."""
        import transformers

        cls = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(cls.config_class(**self.options)).eval()


def tokens(mask: bool = True, batch: int = 2, **more: tuple[int, ...]) -> MakeFeed:
    """Token ids, none of them special, a mask of ones, and further ids by name."""

    def make(length: int) -> Feed:
        found = {"input_ids": torch.randint(5, VOCABULARY - 5, (batch, length))}
        if mask:
            found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        return found | {name: torch.randint(5, VOCABULARY - 5, shape) for name, shape in more.items()}

    return make


def numbers(**shapes: tuple[int, ...]) -> MakeFeed:
    """Normal numbers by name."""
    return lambda _length: {name: torch.randn(*shape) for name, shape in shapes.items()}


def joined(*makers: MakeFeed) -> MakeFeed:
    """Several kinds in one call."""
    return lambda length: {name: t for make in makers for name, t in make(length).items()}


def _text(**more: Any) -> dict[str, Any]:
    """Most encoders and decoders name their sizes like this."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    return sizes | more


def _decoder(**more: Any) -> dict[str, Any]:
    return _text(num_key_value_heads=2, bos_token_id=1, eos_token_id=2) | more


def _pair(**more: Any) -> dict[str, Any]:
    """An encoder and a decoder, as BART names them."""
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder")
             for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return sides | {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 64, "pad_token_id": 0,
                    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None} | more  # fmt: skip


def _t5(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0} | more  # fmt: skip


def _picture(**more: Any) -> dict[str, Any]:
    return {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
            "patch_size": 8} | more  # fmt: skip


def _sound(**more: Any) -> dict[str, Any]:
    """Convolutions over samples, then an encoder, as wav2vec2 names them."""
    return {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16] * 3,
            "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2, "vocab_size": 32} | more  # fmt: skip


def _with_picture(_length: int) -> Feed:
    """Text around a picture of four places, as Qwen2-VL has it."""
    ids = torch.randint(5, 90, (1, 12))
    ids[0, 2:8] = torch.tensor([97, 95, 95, 95, 95, 98])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(16, 96),
            "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 95).long()}  # fmt: skip


def _gpt(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0} | more  # fmt: skip


_IDS, _PLAIN, _BOTH = tokens(), tokens(mask=False), tokens(decoder_input_ids=(2, 5))
_PIXELS, _SAMPLES = numbers(pixel_values=(1, 3, 32, 32)), numbers(input_values=(1, 800))
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: tuple[Family, ...] = (
    # --- encoders of text
    Family("bert", "BertModel", _text(), _IDS),
    Family("roberta", "RobertaModel", _text(max_position_embeddings=80, pad_token_id=1), _IDS),
    Family("distilbert", "DistilBertModel", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, _IDS),
    Family("albert", "AlbertModel", _text(embedding_size=16), _IDS),
    Family("electra", "ElectraModel", _text(embedding_size=16), _IDS),
    Family("deberta-v2", "DebertaV2Model", _text(relative_attention=True, pos_att_type=["p2c", "c2p"]), _IDS),
    Family("mpnet", "MPNetModel", _text(), _IDS),
    Family("camembert", "CamembertModel", _text(pad_token_id=1), _IDS),
    Family("xlm-roberta", "XLMRobertaModel", _text(pad_token_id=1), _IDS),
    Family("modernbert", "ModernBertModel", _text(local_attention=8), _IDS),
    Family("nomic-bert", "NomicBertModel", _text(), _IDS),
    Family("roformer", "RoFormerModel", _text(embedding_size=WIDTH), _IDS),
    Family("convbert", "ConvBertModel", _text(embedding_size=16), _IDS),
    Family("squeezebert", "SqueezeBertModel", _text(embedding_size=WIDTH), _IDS),
    Family("mobilebert", "MobileBertModel", _text(embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16), _IDS),
    Family("fnet", "FNetModel", _text(), _PLAIN),
    Family("esm", "EsmModel", _text(mask_token_id=4), _IDS),
    Family("rembert", "RemBertModel", _text(input_embedding_size=16, output_embedding_size=16), _IDS),
    Family("ernie", "ErnieModel", _text(), _IDS),
    Family("layoutlm", "LayoutLMModel", _text(), _IDS),
    # --- decoders
    Family("gpt2", "GPT2LMHeadModel", _gpt(), _IDS, True),
    Family("gpt-neo", "GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "window_size": 8, "bos_token_id": 1, "eos_token_id": 2}, _IDS, True),
    Family("gpt-neox", "GPTNeoXForCausalLM", _text(bos_token_id=1, eos_token_id=2), _IDS, True),
    Family("gptj", "GPTJForCausalLM", _gpt(rotary_dim=4), _IDS, True),
    Family("codegen", "CodeGenForCausalLM", _gpt(rotary_dim=4), _IDS, True),
    Family("gpt-bigcode", "GPTBigCodeForCausalLM", _gpt(), _IDS, True),
    Family("bloom", "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, _IDS, True),
    Family("opt", "OPTForCausalLM", _text(ffn_dim=64, word_embed_proj_dim=WIDTH, bos_token_id=1, eos_token_id=2), _IDS, True),
    Family("falcon", "FalconForCausalLM", _text(new_decoder_architecture=False, bos_token_id=1, eos_token_id=2), _IDS, True),
    Family("mpt", "MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, _IDS, True),
    Family("llama", "LlamaForCausalLM", _decoder(), _IDS, True),
    Family("mistral", "MistralForCausalLM", _decoder(sliding_window=8), _IDS, True),
    Family("qwen2", "Qwen2ForCausalLM", _decoder(), _IDS, True),
    Family("qwen3", "Qwen3ForCausalLM", _decoder(head_dim=8), _IDS, True),
    Family("gemma", "GemmaForCausalLM", _decoder(head_dim=8), _IDS, True),
    Family("gemma2", "Gemma2ForCausalLM", _decoder(head_dim=8, sliding_window=8), _IDS, True),
    Family("gemma3", "Gemma3ForCausalLM", _decoder(head_dim=8, sliding_window=8), _IDS, True),
    Family("phi", "PhiForCausalLM", _decoder(), _IDS, True),
    Family("phi3", "Phi3ForCausalLM", _decoder(), _IDS, True),
    Family("stablelm", "StableLmForCausalLM", _decoder(), _IDS, True),
    Family("starcoder2", "Starcoder2ForCausalLM", _decoder(), _IDS, True),
    Family("olmo2", "Olmo2ForCausalLM", _decoder(), _IDS, True),
    Family("cohere", "CohereForCausalLM", _decoder(), _IDS, True),
    Family("granite", "GraniteForCausalLM", _decoder(), _IDS, True),
    Family("smollm3", "SmolLM3ForCausalLM", _decoder(), _IDS, True),
    Family("mixtral", "MixtralForCausalLM", _decoder(num_local_experts=4), _IDS, True),
    Family("qwen2-moe", "Qwen2MoeForCausalLM", _decoder(shared_expert_intermediate_size=32, **_MOE), _IDS, True),
    Family("qwen3-moe", "Qwen3MoeForCausalLM", _decoder(head_dim=8, **_MOE), _IDS, True),
    Family("mamba", "MambaForCausalLM", _text(state_size=4, bos_token_id=1, eos_token_id=2), _PLAIN, True),
    Family("mamba2", "Mamba2ForCausalLM", _text(state_size=4, num_heads=8, head_dim=8, n_groups=1, chunk_size=8, bos_token_id=1, eos_token_id=2), _PLAIN, True),
    Family("rwkv", "RwkvForCausalLM", _text(context_length=64, attention_hidden_size=WIDTH), _PLAIN),
    # --- encoders and decoders
    Family("t5", "T5ForConditionalGeneration", _t5(), _BOTH, True),
    Family("mt5", "MT5ForConditionalGeneration", _t5(), _BOTH, True),
    Family("umt5", "UMT5ForConditionalGeneration", _t5(), _BOTH, True),
    Family("bart", "BartForConditionalGeneration", _pair(), _BOTH, True),
    Family("mbart", "MBartForConditionalGeneration", _pair(), _BOTH, True),
    Family("pegasus", "PegasusForConditionalGeneration", _pair(), _BOTH, True),
    Family("marian", "MarianMTModel", _pair(), _BOTH, True),
    Family("m2m-100", "M2M100ForConditionalGeneration", _pair(), _BOTH, True),
    Family("blenderbot", "BlenderbotForConditionalGeneration", _pair(), _BOTH, True),
    # --- pictures
    Family("vit", "ViTForImageClassification", _picture(), _PIXELS),
    Family("deit", "DeiTForImageClassification", _picture(), _PIXELS),
    Family("beit", "BeitForImageClassification", _picture(), _PIXELS),
    Family("swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}, _PIXELS),
    Family("convnext", "ConvNextForImageClassification", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, _PIXELS),
    Family("resnet", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, _PIXELS),
    Family("dinov2", "Dinov2Model", _picture(), _PIXELS),
    Family("siglip-vision", "SiglipVisionModel", _picture(), _PIXELS),
    Family("segformer", "SegformerForSemanticSegmentation", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}, _PIXELS),
    Family("yolos", "YolosForObjectDetection", _picture(image_size=[32, 32], num_detection_tokens=5), _PIXELS),
    Family("dpt", "DPTForDepthEstimation", _picture(num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8), _PIXELS),
    # --- sound
    Family("wav2vec2", "Wav2Vec2ForCTC", _sound(), _SAMPLES),
    Family("hubert", "HubertModel", _sound(), _SAMPLES),
    Family("wavlm", "WavLMModel", _sound(), _SAMPLES),
    Family("data2vec-audio", "Data2VecAudioModel", _sound(conv_pos_kernel_size=5), _SAMPLES),
    Family("whisper", "WhisperForConditionalGeneration", _pair(num_mel_bins=8, max_source_positions=16, max_target_positions=40, suppress_tokens=None, begin_suppress_tokens=None), joined(numbers(input_features=(1, 8, 32)), lambda _: {"decoder_input_ids": torch.randint(5, 90, (1, 5))}), True),
    Family("ast", "ASTForAudioClassification", _picture(max_length=64, num_mel_bins=32), numbers(input_values=(1, 64, 32))),
    # --- both at once, and series
    Family("clip", "CLIPModel", {"text_config": _text(bos_token_id=1, eos_token_id=2), "vision_config": _picture(), "projection_dim": 16}, joined(_IDS, _PIXELS)),
    Family("patchtst", "PatchTSTForPrediction", {"num_input_channels": 3, "context_length": 48, "prediction_length": 12, "d_model": WIDTH, "num_attention_heads": 4, "ffn_dim": 64, "num_hidden_layers": 2}, numbers(past_values=(2, 48, 3))),
    # --- and rarer ones of all kinds
    Family("openai-gpt", "OpenAIGPTLMHeadModel", _gpt(), _IDS),
    Family("xlnet", "XLNetModel", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, _IDS),
    Family("xlm", "XLMModel", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0}, _IDS),
    Family("flaubert", "FlaubertModel", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0}, _IDS),
    Family("longformer", "LongformerModel", _text(attention_window=4, pad_token_id=1, max_position_embeddings=80), _IDS),
    Family("big-bird", "BigBirdModel", _text(attention_type="original_full"), _IDS),
    Family("funnel", "FunnelModel", {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]}, _IDS),
    Family("ibert", "IBertModel", _text(pad_token_id=1), _IDS),
    Family("megatron-bert", "MegatronBertModel", _text(), _IDS),
    Family("splinter", "SplinterModel", _text(), _IDS),
    Family("canine", "CanineModel", _text(downsampling_rate=4, num_hash_buckets=64, local_transformer_stride=8, upsampling_kernel_size=4), tokens()),
    Family("data2vec-text", "Data2VecTextModel", _text(pad_token_id=1), _IDS),
    Family("roc-bert", "RoCBertModel", _text(pronunciation_vocab_size=99, shape_vocab_size=99, pronunciation_embed_dim=8, shape_embed_dim=8), _IDS),
    Family("xmod", "XmodModel", _text(pad_token_id=1, languages=["en_XX"], default_language="en_XX"), _IDS),
    Family("ctrl", "CTRLLMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 64}, _IDS, True),
    Family("biogpt", "BioGptForCausalLM", _text(bos_token_id=1, eos_token_id=2), _IDS, True),
    Family("xglm", "XGLMForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0}, _IDS, True),
    Family("persimmon", "PersimmonForCausalLM", _text(bos_token_id=1, eos_token_id=2), _IDS, True),
    Family("helium", "HeliumForCausalLM", _decoder(head_dim=8), _IDS, True),
    Family("glm", "GlmForCausalLM", _decoder(head_dim=8), _IDS, True),
    Family("olmo", "OlmoForCausalLM", _decoder(), _IDS, True),
    Family("olmoe", "OlmoeForCausalLM", _decoder(num_experts=4, num_experts_per_tok=2), _IDS, True),
    Family("granitemoe", "GraniteMoeForCausalLM", _decoder(num_local_experts=4), _IDS, True),
    Family("phimoe", "PhimoeForCausalLM", _decoder(num_local_experts=4), _IDS, True),
    Family("nemotron", "NemotronForCausalLM", _decoder(), _IDS, True),
    Family("cohere2", "Cohere2ForCausalLM", _decoder(sliding_window=8), _IDS, True),
    Family("gpt-oss", "GptOssForCausalLM", _decoder(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8), _IDS, True),
    Family("deepseek-v3", "DeepseekV3ForCausalLM", _decoder(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, num_key_value_heads=4), _IDS, True),
    Family("falcon-mamba", "FalconMambaForCausalLM", _text(state_size=4, bos_token_id=1, eos_token_id=2), _PLAIN, True),
    Family("jamba", "JambaForCausalLM", _decoder(mamba_d_state=4, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, use_mamba_kernels=False), _IDS, True),
    Family("bamba", "BambaForCausalLM", _decoder(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, attn_layer_indices=[1], mamba_chunk_size=8), _IDS, True),
    Family("recurrent-gemma", "RecurrentGemmaForCausalLM", _decoder(lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"], num_key_value_heads=1), _IDS, True),
    Family("lfm2", "Lfm2ForCausalLM", _decoder(full_attn_idxs=[1], block_multiple_of=8), _IDS, True),
    Family("exaone4", "Exaone4ForCausalLM", _decoder(sliding_window=8, sliding_window_pattern=2), _IDS, True),
    Family("seed-oss", "SeedOssForCausalLM", _decoder(head_dim=8), _IDS, True),
    Family("led", "LEDForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "pad_token_id": 0}, _BOTH, True),
    Family("prophetnet", "ProphetNetForConditionalGeneration", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}, _BOTH, True),
    Family("switch", "SwitchTransformersForConditionalGeneration", _t5(num_experts=4, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), _BOTH, True),
    Family("longt5", "LongT5ForConditionalGeneration", _t5(local_radius=3, num_decoder_layers=2), _BOTH, True),
    Family("plbart", "PLBartForConditionalGeneration", _pair(), _BOTH, True),
    Family("pegasus-x", "PegasusXForConditionalGeneration", _pair(block_size=4, num_global_tokens=2), _BOTH, True),
    Family("bigbird-pegasus", "BigBirdPegasusForConditionalGeneration", _pair(attention_type="original_full"), _BOTH, True),
    Family("vit-msn", "ViTMSNForImageClassification", _picture(), _PIXELS),
    Family("mobilevit", "MobileViTForImageClassification", {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_attention_heads": 2}, numbers(pixel_values=(1, 3, 64, 64))),
    Family("mobilenet-v1", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, _PIXELS),
    Family("mobilenet-v2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, _PIXELS),
    Family("efficientnet", "EfficientNetForImageClassification", {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}, _PIXELS),
    Family("regnet", "RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "groups_width": 8}, _PIXELS),
    Family("poolformer", "PoolFormerForImageClassification", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}, _PIXELS),
    Family("pvt", "PvtForImageClassification", {"image_size": 32, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}, _PIXELS),
    Family("levit", "LevitForImageClassification", {"image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, _PIXELS),
    Family("swinv2", "Swinv2ForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}, _PIXELS),
    Family("convnextv2", "ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, _PIXELS),
    Family("focalnet", "FocalNetForImageClassification", {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}, _PIXELS),
    Family("dinov3", "DINOv3ViTModel", _picture(), _PIXELS),
    Family("hiera", "HieraForImageClassification", {"image_size": [32, 32], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "patch_stride": [4, 4], "patch_size": [7, 7], "patch_padding": [3, 3], "masked_unit_size": [4, 4], "num_query_pool": 1}, _PIXELS),
    Family("videomae", "VideoMAEForVideoClassification", _picture(num_frames=4), numbers(pixel_values=(1, 4, 3, 32, 32))),
    Family("timesformer", "TimesformerForVideoClassification", _picture(num_frames=2), numbers(pixel_values=(1, 2, 3, 32, 32))),
    Family("unispeech", "UniSpeechModel", _sound(num_codevector_groups=2, codevector_dim=16, proj_codevector_dim=16), _SAMPLES),
    Family("sew", "SEWModel", _sound(squeeze_factor=2), _SAMPLES),
    Family("wav2vec2-conformer", "Wav2Vec2ConformerModel", _sound(), _SAMPLES),
    Family("wav2vec2-bert", "Wav2Vec2BertModel", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "feature_projection_input_dim": 16}, numbers(input_features=(1, 20, 16))),
    Family("speech-to-text", "Speech2TextForConditionalGeneration", _pair(input_feat_per_channel=8, conv_channels=16, max_source_positions=64, max_target_positions=64), joined(numbers(input_features=(1, 24, 8)), lambda _length: {"decoder_input_ids": torch.randint(5, VOCABULARY - 5, (1, 5))})),
    Family("siglip", "SiglipModel", {"text_config": _text(), "vision_config": _picture()}, joined(tokens(mask=False), _PIXELS)),
    Family("vilt", "ViltModel", _picture(vocab_size=VOCABULARY, max_position_embeddings=64), joined(tokens(batch=1), _PIXELS)),
    Family("blip", "BlipModel", {"text_config": _text(encoder_hidden_size=32), "vision_config": _picture(), "projection_dim": 16}, joined(tokens(batch=1), _PIXELS)),
    Family("git", "GitForCausalLM", _text(vision_config=_picture(), bos_token_id=1, eos_token_id=2), tokens()),
    # --- codecs, and a model that says where pictures stand in the text
    Family("encodec", "EncodecModel", {"num_filters": 4, "hidden_size": 16, "codebook_size": 64, "codebook_dim": 16, "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "target_bandwidths": [6.0], "sampling_rate": 8000}, numbers(input_values=(1, 1, 800))),
    Family("mimi", "MimiModel", {"num_filters": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "codebook_size": 64, "codebook_dim": 16, "num_quantizers": 4, "upsampling_ratios": [8, 5, 4], "vector_quantization_hidden_dimension": 16, "upsample_groups": 32, "head_dim": 8}, numbers(input_values=(1, 1, 3840))),
    Family("qwen2-vl", "Qwen2VLForConditionalGeneration", {"text_config": _decoder(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}), "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2}, "image_token_id": 95, "video_token_id": 96, "vision_start_token_id": 97, "vision_end_token_id": 98}, _with_picture),
    Family("patchtsmixer", "PatchTSMixerForPrediction", {"context_length": 48, "prediction_length": 12, "num_input_channels": 3, "d_model": 16, "patch_length": 8, "patch_stride": 8, "num_layers": 2}, numbers(past_values=(2, 48, 3))),
)  # fmt: skip
