"""Architectures that came after the first table was tuned for: a row each, so that speed is measured where nobody looked."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.corpus.builders import TorchModel, diffusers_model, timm_model, transformers_model
from benchmarks.corpus.inputs import integers, joined, normal, pixels, tokens
from benchmarks.corpus.torch_models import AUDIO, DECODER, IDS, PLAIN, SMALL, TEXT

_SERIES: dict[str, Any] = dict(prediction_length=12, context_length=24, lags_sequence=[1, 2, 3], num_time_features=1, d_model=64, encoder_layers=2, decoder_layers=2,
               encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128)  # fmt: skip
_PAST = joined(normal(past_values=(2, 27), past_time_features=(2, 27, 1), future_time_features=(2, 12, 1)),
               lambda _rng: {"past_observed_mask": torch.ones(2, 27)})  # fmt: skip

FURTHER_MODELS: tuple[TorchModel, ...] = (
    # --- encoders of text that do not attend as BERT does
    TorchModel("modernbert", "text", transformers_model("ModernBertModel", "ModernBertConfig", local_attention=16, pad_token_id=0, **TEXT), IDS),
    TorchModel("roformer", "text", transformers_model("RoFormerModel", "RoFormerConfig", embedding_size=128, **TEXT), IDS),
    TorchModel("convbert", "text", transformers_model("ConvBertModel", "ConvBertConfig", embedding_size=64, **TEXT), IDS),
    TorchModel("squeezebert", "text", transformers_model("SqueezeBertModel", "SqueezeBertConfig", embedding_size=128, **TEXT), IDS),
    TorchModel("mobilebert", "text", transformers_model("MobileBertModel", "MobileBertConfig", embedding_size=64, intra_bottleneck_size=64, true_hidden_size=64, **TEXT), IDS),
    TorchModel("nystromformer", "text", transformers_model("NystromformerModel", "NystromformerConfig", num_landmarks=8, segment_means_seq_len=64, **TEXT), IDS),
    TorchModel("xlnet", "text", transformers_model("XLNetModel", "XLNetConfig", vocab_size=2000, d_model=128, n_layer=3, n_head=4, d_inner=256), IDS),
    TorchModel("big-bird", "text", transformers_model("BigBirdModel", "BigBirdConfig", attention_type="block_sparse", block_size=16, num_random_blocks=1, **TEXT), tokens(2000, 1, 192)),
    TorchModel("longformer", "text", transformers_model("LongformerModel", "LongformerConfig", attention_window=16, **TEXT), IDS),
    TorchModel("esm", "text", transformers_model("EsmModel", "EsmConfig", position_embedding_type="rotary", pad_token_id=1, mask_token_id=4, **TEXT), IDS),
    TorchModel("canine", "text", transformers_model("CanineModel", "CanineConfig", num_hash_functions=4, num_hash_buckets=256, local_transformer_stride=32, **SMALL), tokens(2000, 1, 128)),
    # --- decoders
    TorchModel("gptj", "text", transformers_model("GPTJForCausalLM", "GPTJConfig", vocab_size=2000, n_embd=128, n_layer=3, n_head=4, rotary_dim=16, use_cache=False), PLAIN),
    TorchModel("falcon", "text", transformers_model("FalconForCausalLM", "FalconConfig", new_decoder_architecture=False, use_cache=False, **TEXT), PLAIN),
    TorchModel("gemma3", "text", transformers_model("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=32, sliding_window=16, **DECODER), PLAIN),
    TorchModel("phi3", "text", transformers_model("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **DECODER), PLAIN),
    TorchModel("cohere", "text", transformers_model("CohereForCausalLM", "CohereConfig", **DECODER), PLAIN),
    TorchModel("marian", "text", transformers_model("MarianModel", "MarianConfig", vocab_size=2000, pad_token_id=0, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=128, use_cache=False), joined(IDS, integers(decoder_input_ids=(2000, (1, 16))))),
    TorchModel("olmoe", "mixtures", transformers_model("OlmoeForCausalLM", "OlmoeConfig", num_experts=8, num_experts_per_tok=2, **DECODER), PLAIN, False),
    TorchModel("granite-moe", "mixtures", transformers_model("GraniteMoeForCausalLM", "GraniteMoeConfig", num_local_experts=8, num_experts_per_tok=2, **DECODER), PLAIN, False),
    TorchModel("mamba2", "state space", transformers_model("Mamba2ForCausalLM", "Mamba2Config", vocab_size=2000, hidden_size=64, state_size=16, num_heads=8, head_dim=16, n_groups=1, chunk_size=16, num_hidden_layers=2, use_cache=False), tokens(2000, 1, 32, mask=False), False),
    TorchModel("recurrent-gemma", "state space", transformers_model("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", attention_window_size=16, lru_width=128, **DECODER), PLAIN, False),
    # --- pictures
    TorchModel("beit", "classification", transformers_model("BeitForImageClassification", "BeitConfig", image_size=96, use_relative_position_bias=True, **SMALL), pixels(1, 96)),
    TorchModel("dinov2", "classification", transformers_model("Dinov2Model", "Dinov2Config", image_size=98, use_swiglu_ffn=True, **SMALL), pixels(1, 98)),
    TorchModel("pvt-v2", "classification", transformers_model("PvtV2ForImageClassification", "PvtV2Config", image_size=96, hidden_sizes=[16, 32, 80, 128], depths=[1, 1, 1, 1]), pixels(1, 96)),
    TorchModel("focalnet", "classification", transformers_model("FocalNetForImageClassification", "FocalNetConfig", image_size=96, embed_dim=32, depths=[1, 1, 2, 1], focal_levels=[2, 2, 2, 2]), pixels(1, 96)),
    TorchModel("swiftformer", "classification", transformers_model("SwiftFormerForImageClassification", "SwiftFormerConfig", image_size=96, depths=[1, 1, 2, 1], embed_dims=[24, 32, 64, 96]), pixels(1, 96)),
    TorchModel("hiera", "classification", transformers_model("HieraForImageClassification", "HieraConfig", image_size=[96, 96], embed_dim=48, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]), pixels(1, 96)),
    TorchModel("efficientvit", "classification", timm_model("efficientvit_b0"), pixels(1, 128, "x")),
    TorchModel("fastvit", "classification", timm_model("fastvit_t8"), pixels(1, 128, "x")),
    TorchModel("repvit", "classification", timm_model("repvit_m0_9"), pixels(1, 128, "x")),
    TorchModel("edgenext", "classification", timm_model("edgenext_xx_small"), pixels(1, 128, "x")),
    TorchModel("convmixer", "classification", timm_model("convmixer_1024_20_ks9_p14"), pixels(1, 96, "x")),
    TorchModel("xcit", "classification", timm_model("xcit_nano_12_p16_224", img_size=96, depth=4), pixels(1, 96, "x")),
    TorchModel("sequencer", "classification", timm_model("sequencer2d_s", layers=(1, 1, 2, 1)), pixels(1, 112, "x")),
    TorchModel("nfnet", "classification", timm_model("nfnet_l0"), pixels(1, 96, "x")),
    TorchModel("vovnet", "classification", timm_model("ese_vovnet19b_dw"), pixels(1, 128, "x")),
    TorchModel("dla", "classification", timm_model("dla34"), pixels(1, 96, "x")),
    TorchModel("res2net", "classification", timm_model("res2net50_14w_8s"), pixels(1, 96, "x")),
    TorchModel("sknet", "classification", timm_model("skresnet18"), pixels(1, 96, "x")),
    TorchModel("lambda-resnet", "classification", timm_model("lambda_resnet26t", img_size=128), pixels(1, 128, "x")),
    TorchModel("mvitv2", "classification", timm_model("mvitv2_tiny", img_size=128), pixels(1, 128, "x")),
    # --- moving pictures, latents, depth
    TorchModel("timesformer", "video", transformers_model("TimesformerForVideoClassification", "TimesformerConfig", image_size=64, patch_size=16, num_frames=4, **SMALL), normal(pixel_values=(1, 4, 3, 64, 64))),
    TorchModel("perceiver", "latents", transformers_model("PerceiverModel", "PerceiverConfig", num_latents=32, d_latents=64, d_model=96, num_blocks=1, num_self_attends_per_block=3, num_self_attention_heads=4, num_cross_attention_heads=4), normal(inputs=(1, 100, 96))),
    TorchModel("glpn", "segmentation", transformers_model("GLPNForDepthEstimation", "GLPNConfig", hidden_sizes=[16, 32, 80, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32), pixels(1, 96)),
    # --- networks of diffusion pipelines
    TorchModel("unet-diffusion", "diffusion", diffusers_model("UNet2DModel", sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8), joined(normal(sample=(1, 3, 32, 32)), integers(timestep=(1000, (1,))))),
    TorchModel("unet-conditioned", "diffusion", diffusers_model("UNet2DConditionModel", sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8, cross_attention_dim=64, attention_head_dim=8), joined(normal(sample=(1, 4, 16, 16), encoder_hidden_states=(1, 16, 64)), integers(timestep=(1000, (1,))))),
    TorchModel("autoencoder-kl", "diffusion", diffusers_model("AutoencoderKL", in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(32, 64), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=32), normal(sample=(1, 3, 48, 48))),
    TorchModel("dit", "diffusion", diffusers_model("DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=32, in_channels=4, num_layers=3, sample_size=16, patch_size=2, num_embeds_ada_norm=1000), joined(normal(hidden_states=(1, 4, 16, 16)), integers(timestep=(1000, (1,)), class_labels=(1000, (1,))))),
    # --- sound and series
    TorchModel("wavlm", "speech", transformers_model("WavLMModel", "WavLMConfig", **AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("conformer", "speech", transformers_model("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", position_embeddings_type="relative", **AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("speech2text", "speech", transformers_model("Speech2TextModel", "Speech2TextConfig", "encoder", vocab_size=100, d_model=128, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, conv_channels=128), normal(input_features=(1, 200, 80))),
    TorchModel("univnet", "audio", transformers_model("UnivNetModel", "UnivNetConfig", model_hidden_channels=16), joined(normal(input_features=(1, 20, 100), noise_sequence=(1, 20, 64))), False),
    TorchModel("series-transformer", "time series", transformers_model("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", "model", **_SERIES), _PAST, False),
    TorchModel("decision", "time series", transformers_model("DecisionTransformerModel", "DecisionTransformerConfig", state_dim=17, act_dim=4, hidden_size=128, n_layer=3, n_head=4, max_ep_len=100), joined(normal(states=(1, 20, 17), actions=(1, 20, 4), rewards=(1, 20, 1), returns_to_go=(1, 20, 1)), integers(timesteps=(100, (1, 20)))), False),
)  # fmt: skip
"""Every transformer with three layers 128 wide, unless its family has none; pictures of about 100 pixels."""
