"""Models of Hugging Face's transformers, smaller than published, called as its documentation calls them.

Inputs are dicts with the labels in them; the loss is the one that the model returns.
"""

import importlib.util

import torch
import torch.nn.functional as F

if importlib.util.find_spec("torchvision"):  # which transformers imports as it is
    import torchvision_models  # noqa: F401
import transformers as hf
from task import Task, classes, in_double, named, numbers

COMMON = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SIZES = {key: COMMON[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
GPT = dict(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def own_loss(output, _):
    """The loss that the model computed."""
    return output.loss


def pair_loss(output, target):
    """Of the text and the picture that belong together, among those of the minibatch."""
    logits = output.logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits)))


def gpt2():
    config = hf.GPT2Config(**GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def gpt2_with_dropout():
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT))


def bert_classifier():
    return hf.BertForSequenceClassification(hf.BertConfig(**COMMON, **NO_DROPOUT, num_labels=3))


def bert_masked():
    return hf.BertForMaskedLM(hf.BertConfig(**COMMON, **NO_DROPOUT))


def roberta():
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**COMMON, **NO_DROPOUT, num_labels=3))


def distilbert():
    config = hf.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32, dropout=0.0)
    config.attention_dropout = 0.0
    config.seq_classif_dropout, config.num_labels = 0.0, 3
    return hf.DistilBertForSequenceClassification(config)


def albert():
    config = hf.AlbertConfig(**COMMON, **NO_DROPOUT, embedding_size=8, classifier_dropout_prob=0.0, num_labels=3)
    return hf.AlbertForSequenceClassification(config)


def electra():
    return hf.ElectraForTokenClassification(hf.ElectraConfig(**COMMON, **NO_DROPOUT, embedding_size=8, num_labels=3))


def deberta():
    config = hf.DebertaV2Config(**COMMON, **NO_DROPOUT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    config.num_labels = 3
    return hf.DebertaV2ForSequenceClassification(config)


def longformer():
    config = hf.LongformerConfig(**COMMON, **NO_DROPOUT, attention_window=[4, 4], num_labels=3)
    return hf.LongformerForSequenceClassification(config)


def t5():
    config = hf.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config)


def bart():
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes |= dict(encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, dropout=0.0, use_cache=False)
    config = hf.BartConfig(
        vocab_size=40, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2
    )
    return hf.BartForConditionalGeneration(config)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, num_key_value_heads=1))


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**COMMON, num_key_value_heads=1, sliding_window=4))


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**COMMON, num_key_value_heads=1, num_local_experts=4))


def qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**COMMON, num_key_value_heads=1))


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, num_key_value_heads=1, head_dim=8))


def gemma2():
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**COMMON, num_key_value_heads=1, head_dim=8))


def phi():
    return hf.PhiForCausalLM(hf.PhiConfig(**COMMON, resid_pdrop=0.0, embd_pdrop=0.0))


def opt():
    sizes = dict(hidden_size=16, num_hidden_layers=2, ffn_dim=32, max_position_embeddings=16, num_attention_heads=2)
    return hf.OPTForCausalLM(hf.OPTConfig(vocab_size=40, **sizes, word_embed_proj_dim=16, dropout=0.0, pad_token_id=0))


def bloom():
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0))


def gpt_neox():
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**COMMON))


def falcon():
    return hf.FalconForCausalLM(hf.FalconConfig(**COMMON))


def mamba():
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    )


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, **NO_DROPOUT, image_size=32, patch_size=8, num_labels=3))


def swin():
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4, drop_path_rate=0.1
    )
    config.num_labels = 3
    return hf.SwinForImageClassification(config)


def convnext():
    config = hf.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    return hf.ConvNextForImageClassification(config)


def resnet():
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config)


def segformer():
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        num_labels=3,
    )
    return hf.SegformerForSemanticSegmentation(config)


def clip():
    text = dict(SIZES, vocab_size=40, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = hf.CLIPConfig(text_config=text, vision_config=dict(SIZES, image_size=32, patch_size=8), projection_dim=8)
    return hf.CLIPModel(config)


def whisper():
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, d_model=16)
    sizes |= dict(encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_target_positions=16)
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(vocab_size=40, **sizes, **special, use_cache=False))


def wav2vec2():
    config = hf.Wav2Vec2Config(
        vocab_size=40,
        **SIZES,
        conv_dim=[8, 8],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        num_labels=3,
        classifier_proj_size=8,
    )
    return hf.Wav2Vec2ForSequenceClassification(config)


def mask(generator):
    """Of 3 to 8 tokens; the others are padding."""
    return (torch.arange(8) < torch.randint(3, 9, (), generator=generator)).long()


TOKENS, CLASS, IMAGE = classes(40, 8), classes(3), numbers(3, 32, 32)


def text(generator):
    """Token numbers, and the same as labels."""
    tokens = TOKENS(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


SENTENCE = named(input_ids=TOKENS, attention_mask=mask, labels=CLASS)
TAGGED = named(input_ids=TOKENS, attention_mask=mask, labels=classes(3, 8))
PAIR = named(input_ids=TOKENS, attention_mask=mask, labels=TOKENS)
PICTURE = named(pixel_values=IMAGE, labels=CLASS)
CAUSAL = (gpt2, llama, mistral, mixtral, qwen2, qwen3, phi, bloom, gpt_neox, mamba)
MODELS = {
    **{build.__name__: Task(build, text, CLASS, own_loss) for build in CAUSAL},
    "gemma2": in_double(Task(gemma2, text, CLASS, own_loss)),
    "gpt2_with_dropout": Task(gpt2_with_dropout, text, CLASS, own_loss, noisy=True),
    "falcon": Task(falcon, text, CLASS, own_loss),
    "opt": Task(opt, PAIR, CLASS, own_loss, noisy=True),  # attention_dropout is left as it is
    "bert_classifier": Task(bert_classifier, SENTENCE, CLASS, own_loss),
    "bert_masked": Task(bert_masked, PAIR, CLASS, own_loss),
    "roberta": Task(roberta, SENTENCE, CLASS, own_loss),
    "distilbert": Task(distilbert, SENTENCE, CLASS, own_loss),
    "albert": Task(albert, SENTENCE, CLASS, own_loss),
    "electra": Task(electra, TAGGED, CLASS, own_loss),
    "deberta": Task(deberta, SENTENCE, CLASS, own_loss),
    "longformer": Task(longformer, SENTENCE, CLASS, own_loss),
    "t5": Task(t5, PAIR, CLASS, own_loss),
    "bart": Task(bart, PAIR, CLASS, own_loss),
    "vit": Task(vit, PICTURE, CLASS, own_loss),
    "swin": Task(swin, PICTURE, CLASS, own_loss, noisy=True),
    "convnext": in_double(Task(convnext, PICTURE, CLASS, own_loss)),
    "resnet": Task(resnet, PICTURE, CLASS, own_loss),
    "segformer": Task(segformer, named(pixel_values=IMAGE, labels=classes(3, 32, 32)), CLASS, own_loss),
    "clip": in_double(Task(clip, named(input_ids=TOKENS, pixel_values=IMAGE), CLASS, pair_loss)),
    "whisper": Task(whisper, named(input_features=numbers(8, 20), labels=TOKENS), CLASS, own_loss),
    "wav2vec2": Task(wav2vec2, named(input_values=numbers(400), labels=CLASS), CLASS, own_loss, noisy=True),
}
