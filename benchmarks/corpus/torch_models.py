"""Torch models of the corpus: name, family, how to build it, inputs. Small shapes of what `transformers` and `timm` list."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.corpus.builders import TorchModel, own_network, timm_model, transformers_model
from benchmarks.corpus.inputs import adjacency, edges, integers, joined, normal, ones, pixels, tokens

SMALL: dict[str, Any] = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256)
TEXT: dict[str, Any] = SMALL | dict(vocab_size=2000, max_position_embeddings=256)
DECODER: dict[str, Any] = TEXT | dict(num_key_value_heads=2, use_cache=False)
AUDIO: dict[str, Any] = SMALL | dict(conv_dim=[64] * 7, num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4, vocab_size=32)
SERIES: dict[str, Any] = dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
               encoder_ffn_dim=64, decoder_ffn_dim=64)
IDS, PLAIN = tokens(2000, 1, 64), tokens(2000, 1, 64, mask=False)


TORCH_MODELS: tuple[TorchModel, ...] = (
    # --- text
    TorchModel("bert", "text", transformers_model("BertModel", "BertConfig", **TEXT), IDS),
    TorchModel("albert", "text", transformers_model("AlbertModel", "AlbertConfig", embedding_size=64, **TEXT), IDS),
    TorchModel("electra", "text", transformers_model("ElectraModel", "ElectraConfig", embedding_size=64, **TEXT), IDS),
    TorchModel("mpnet", "text", transformers_model("MPNetModel", "MPNetConfig", **TEXT), IDS),
    TorchModel("deberta", "text", transformers_model("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], **TEXT), IDS, False),
    TorchModel("fnet", "text", transformers_model("FNetModel", "FNetConfig", **TEXT), PLAIN, False),
    TorchModel("t5-encoder", "text", transformers_model("T5EncoderModel", "T5Config", vocab_size=2000, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4), IDS),
    TorchModel("gpt2", "text", transformers_model("GPT2LMHeadModel", "GPT2Config", vocab_size=2000, n_embd=128, n_layer=3, n_head=4, use_cache=False), IDS),
    TorchModel("gpt-neox", "text", transformers_model("GPTNeoXForCausalLM", "GPTNeoXConfig", use_cache=False, **TEXT), PLAIN),
    TorchModel("bloom", "text", transformers_model("BloomForCausalLM", "BloomConfig", vocab_size=2000, hidden_size=128, n_layer=3, n_head=4, use_cache=False), IDS, False),
    TorchModel("opt", "text", transformers_model("OPTForCausalLM", "OPTConfig", vocab_size=2000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, ffn_dim=256, word_embed_proj_dim=128, max_position_embeddings=256, use_cache=False), IDS, False),
    TorchModel("llama", "text", transformers_model("LlamaForCausalLM", "LlamaConfig", **DECODER), PLAIN),
    TorchModel("qwen2", "text", transformers_model("Qwen2ForCausalLM", "Qwen2Config", **DECODER), PLAIN, False),
    TorchModel("gemma2", "text", transformers_model("Gemma2ForCausalLM", "Gemma2Config", head_dim=32, **DECODER), PLAIN, False),
    TorchModel("bart", "text", transformers_model("BartModel", "BartConfig", vocab_size=2000, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=256, use_cache=False), IDS, False),
    # --- mixtures
    TorchModel("mixtral", "mixtures", transformers_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **DECODER), PLAIN, False),
    TorchModel("qwen2-moe", "mixtures", transformers_model("Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128, **DECODER), PLAIN, False),
    # --- state-space models
    TorchModel("mamba", "state space", transformers_model("MambaForCausalLM", "MambaConfig", vocab_size=2000, hidden_size=64, state_size=8, num_hidden_layers=2, use_cache=False), tokens(2000, 1, 32, mask=False), False),
    TorchModel("rwkv", "state space", transformers_model("RwkvForCausalLM", "RwkvConfig", vocab_size=2000, hidden_size=64, num_hidden_layers=2, context_length=64, use_cache=False), tokens(2000, 1, 32, mask=False), False),
    TorchModel("selective-scan", "state space", own_network("SelectiveScan"), normal(x=(1, 32, 64))),
    TorchModel("long-convolution", "state space", own_network("LongConvolution"), normal(x=(1, 256, 64)), False),
    # --- classification
    TorchModel("vit", "classification", transformers_model("ViTForImageClassification", "ViTConfig", image_size=96, **SMALL), pixels(1, 96)),
    TorchModel("swin", "classification", transformers_model("SwinForImageClassification", "SwinConfig", image_size=112, embed_dim=48, depths=[1, 1, 2], num_heads=[2, 4, 8]), pixels(1, 112)),
    TorchModel("convnext", "classification", transformers_model("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[32, 64, 128, 192], depths=[1, 1, 2, 1]), pixels(1, 96)),
    TorchModel("mobilevit", "classification", transformers_model("MobileViTForImageClassification", "MobileViTConfig", hidden_sizes=[48, 64, 80], neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 160], image_size=96), pixels(1, 96), False),
    TorchModel("levit", "classification", transformers_model("LevitForImageClassification", "LevitConfig", image_size=96, hidden_sizes=[64, 96, 128], num_attention_heads=[2, 3, 4], depths=[1, 1, 1]), pixels(1, 96), False),
    TorchModel("mobilenetv3", "classification", timm_model("mobilenetv3_small_100"), pixels(1, 128, "x")),
    TorchModel("efficientnet", "classification", timm_model("efficientnet_b0"), pixels(1, 128, "x")),
    TorchModel("resnet18", "classification", timm_model("resnet18"), pixels(1, 128, "x")),
    TorchModel("resnext", "classification", timm_model("resnext26ts"), pixels(1, 128, "x"), False),
    TorchModel("regnet", "classification", timm_model("regnety_002"), pixels(1, 128, "x")),
    TorchModel("densenet", "classification", timm_model("densenet121"), pixels(1, 96, "x"), False),
    TorchModel("ghostnet", "classification", timm_model("ghostnet_100"), pixels(1, 128, "x"), False),
    TorchModel("mixer", "classification", timm_model("mixer_s32_224", img_size=96), pixels(1, 96, "x")),
    TorchModel("poolformer", "classification", timm_model("poolformer_s12"), pixels(1, 96, "x"), False),
    TorchModel("repvgg", "classification", timm_model("repvgg_a0"), pixels(1, 96, "x"), False),
    TorchModel("inception", "classification", timm_model("inception_v3"), pixels(1, 128, "x"), False),
    TorchModel("mnasnet", "classification", timm_model("mnasnet_small"), pixels(1, 128, "x"), False),
    TorchModel("coatnet", "classification", timm_model("coatnet_pico_rw_224", img_size=96), pixels(1, 96, "x"), False),
    # --- detection
    TorchModel("yolos", "detection", transformers_model("YolosForObjectDetection", "YolosConfig", image_size=[96, 96], num_detection_tokens=20, **SMALL), pixels(1, 96), False),
    TorchModel("yolo8", "detection", own_network("Detector"), pixels(1, 160, "x")),
    TorchModel("owlvit-vision", "detection", transformers_model("OwlViTVisionModel", "OwlViTVisionConfig", image_size=96, patch_size=16, **SMALL), pixels(1, 96), False),
    # --- segmentation and depth
    TorchModel("segformer", "segmentation", transformers_model("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], decoder_hidden_size=64, num_labels=8), pixels(1, 128)),
    TorchModel("unet", "segmentation", own_network("UNet"), pixels(1, 96, "x")),
    TorchModel("dpt", "segmentation", transformers_model("DPTForDepthEstimation", "DPTConfig", image_size=96, patch_size=16, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 32, 64, 64], fusion_hidden_size=32, **SMALL | dict(num_hidden_layers=4)), pixels(1, 96), False),
    TorchModel("hrnet", "segmentation", timm_model("hrnet_w18_small"), pixels(1, 96, "x"), False),
    # --- super-resolution
    TorchModel("edsr", "super-resolution", own_network("SuperResolution"), pixels(1, 48, "x")),
    TorchModel("swin2sr", "super-resolution", transformers_model("Swin2SRForImageSuperResolution", "Swin2SRConfig", image_size=32, embed_dim=32, depths=[2, 2], num_heads=[2, 2], window_size=8, upscale=2), pixels(1, 32), False),
    # --- speech and audio
    TorchModel("wav2vec2", "speech", transformers_model("Wav2Vec2ForCTC", "Wav2Vec2Config", **AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("hubert", "speech", transformers_model("HubertModel", "HubertConfig", **AUDIO), normal(input_values=(1, 16000)), False),
    TorchModel("whisper-encoder", "speech", transformers_model("WhisperModel", "WhisperConfig", "encoder", d_model=128, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=100), normal(input_features=(1, 80, 200))),
    TorchModel("quartznet", "speech", own_network("Separable"), normal(x=(1, 64, 200))),
    TorchModel("pitch", "audio", own_network("Pitch"), normal(x=(4, 1024))),
    TorchModel("wavenet", "audio", own_network("WaveNet"), normal(x=(1, 1, 1024))),
    TorchModel("ast", "audio", transformers_model("ASTForAudioClassification", "ASTConfig", max_length=128, num_mel_bins=64, **SMALL), normal(input_values=(1, 128, 64))),
    TorchModel("encodec", "audio", transformers_model("EncodecModel", "EncodecConfig", "encoder", num_filters=8, hidden_size=32), normal(hidden_states=(1, 1, 3200)), False),
    # --- time series
    TorchModel("patchtst", "time series", transformers_model("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=4, context_length=96, prediction_length=24, d_model=64, num_attention_heads=4, ffn_dim=128, num_hidden_layers=2), normal(past_values=(2, 96, 4)), False),
    TorchModel("tsmixer", "time series", transformers_model("PatchTSMixerForPrediction", "PatchTSMixerConfig", num_input_channels=4, context_length=96, prediction_length=24, patch_length=8, patch_stride=8, d_model=32, num_layers=3), normal(past_values=(2, 96, 4)), False),
    TorchModel("autoformer", "time series", transformers_model("AutoformerForPrediction", "AutoformerConfig", "model.encoder", prediction_length=24, context_length=48, **SERIES), normal(inputs_embeds=(2, 48, 9)), False),
    TorchModel("lstm", "time series", own_network("Recurrent"), normal(x=(1, 32, 32))),
    TorchModel("deepar", "time series", own_network("Forecast"), normal(x=(2, 48, 4))),
    TorchModel("nbeats", "time series", own_network("NBeats"), normal(x=(8, 96))),
    # --- graphs, recommenders
    TorchModel("gcn", "graphs", own_network("GraphConvolutions"), adjacency(200, 64)),
    TorchModel("gat", "graphs", own_network("GraphAttention"), edges(200, 64, 1600), False),
    TorchModel("dlrm", "recommenders", own_network("Recommender"), joined(normal(dense=(16, 13)), lambda rng: {"ids": torch.randint(0, 1000, (16, 8, 4), generator=rng)}), False),
    # --- what papers' code has besides layers
    TorchModel("gated-unet", "segmentation", own_network("GatedUNet"), pixels(1, 96, "x")),
    TorchModel("global-response", "classification", own_network("GlobalResponse"), pixels(1, 96, "x")),
    TorchModel("channel-shuffle", "classification", own_network("ChannelShuffle"), pixels(2, 96, "x")),
    TorchModel("fourier-operator", "operators", own_network("FourierOperator"), normal(x=(1, 1, 48, 48)), False),
    TorchModel("neighbour-graph", "graphs", own_network("NeighbourGraph"), normal(x=(2, 3, 256)), False),
    TorchModel("message-passing", "graphs", own_network("MessagePassing"), joined(edges(400, 32, 3000), integers(graph=(16, (400,)))), False),
    TorchModel("modulated", "generation", own_network("ModulatedConvolution"), normal(z=(2, 64)), False),
    TorchModel("translator", "text", own_network("Translator"), integers(source=(500, (2, 20))), False),
    TorchModel("packed-tagger", "text", own_network("PackedTagger"), joined(normal(x=(4, 30, 24)), lambda _rng: {"lengths": torch.tensor([9, 30, 17, 22])}), False),
    TorchModel("capsules", "classification", own_network("Capsules"), normal(x=(4, 1, 28, 28))),
    TorchModel("splines", "plain", own_network("Splines"), normal(x=(64, 16))),
    TorchModel("suppression", "detection", own_network("Suppression"), normal(boxes=(100, 4), logits=(100, 10)), False),
    TorchModel("spectral-mask", "audio", own_network("SpectralMask"), normal(x=(1, 8000)), False),
    # --- vision and language
    TorchModel("clip-text", "text", transformers_model("CLIPTextModel", "CLIPTextConfig", bos_token_id=0, eos_token_id=2, **TEXT), IDS, False),
    TorchModel("vilt", "multimodal", transformers_model("ViltModel", "ViltConfig", image_size=64, patch_size=16, max_image_length=-1, **TEXT), joined(tokens(2000, 1, 16), pixels(1, 64), ones(torch.int64, pixel_mask=(1, 64, 64))), False),
    # --- plain ones
    TorchModel("mlp", "plain", own_network("Mlp"), normal(x=(1, 256))),
    TorchModel("cnn", "plain", own_network("Cnn"), pixels(1, 64, "x")),
)  # fmt: skip
