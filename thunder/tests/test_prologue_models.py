"""Small models of the families that people compile with Thunder, randomly initialised; nothing is downloaded."""

import functools

import pytest
import torch

import thunder
from thunder.core.interpreter import InterpreterError
from thunder.tests.prologue_variants import BOTH, VARIANTS, check

# Each model is compiled unfused and for these variants. To compile takes seconds a layer, so that most get only one.
ALL, ONE = tuple(VARIANTS), (BOTH,)


def outputs(call, *args):
    """The tensors that a call returns, without the containers that are the library's own."""
    result = call(*args)
    result = getattr(result, "last_hidden_state", getattr(result, "logits", result))
    return torch.utils._pytree.tree_leaves(result)


@functools.cache
def serving(make_args):
    def serve(call, model):
        with torch.no_grad():
            return [outputs(call, *make_args()) for _ in range(2)]

    return serve


@functools.cache
def training(make_args):
    def train(call, model):
        """The outputs and gradients of two calls."""
        history = []
        for _ in range(2):
            results = outputs(call, *make_args())
            parameters = [p for p in model.parameters() if p.requires_grad]
            loss = sum(result.float().square().mean() for result in results)
            history.append(([r.detach() for r in results], torch.autograd.grad(loss, parameters, allow_unused=True)))
        return history

    return train


def check_model(variant, make, scenario):
    outcome = check(variant, make, scenario, rtol=1e-3, atol=1e-4)
    assert (outcome.hits, outcome.misses) == (1, 1)


def tokens():
    return (torch.arange(10).view(2, 5),)


#
# LitGPT
#

LITGPT = {
    "pythia-14m": ONE,  # GPT-NeoX
    "open_llama_3b": ONE,
    "Llama-2-7b-hf": ONE,
    "Llama-3-8B": ALL,
    "R1-Distill-Llama-8B": ONE,  # DeepSeek; LitGPT has no other of theirs
    "falcon-7b": ONE,
    "phi-2": ONE,
    "Gemma-2-2b": ONE,
    "Gemma-3-1b-it": ONE,
    "Qwen2.5-0.5B": ONE,
    "Qwen3-0.6B": ONE,
    "OLMo-1B-hf": ONE,
    "OLMo-2-1124-7B": ONE,
}


def config_of(name, module="litgpt.config", **more):
    """The configuration of a model, as narrow and shallow as can be."""
    config_class = pytest.importorskip(module).Config
    config = config_class.from_name(name)
    groups = {1: 1, config.n_head: 4}.get(config.n_query_groups, 2)
    small = {"n_layer": 1, "n_embd": 32, "n_head": 4, "head_size": 8, "n_query_groups": groups}
    small |= {"vocab_size": 40, "padded_vocab_size": 64, "block_size": 16}
    small |= {key: 48 for key in ("intermediate_size", "moe_intermediate_size") if getattr(config, key, None)}
    small |= {"sliding_window_size": 4} if config.sliding_window_size else {}
    return config_class.from_name(name, **small, **more)


@functools.cache
def litgpt(name):
    return lambda: pytest.importorskip("litgpt").GPT(config_of(name))


@pytest.mark.parametrize("name, variant", [(name, variant) for name in LITGPT for variant in LITGPT[name]])
def test_litgpt(name, variant):
    check_model(variant, litgpt(name), serving(tokens))


def lora():
    module = pytest.importorskip("litgpt.lora")
    config = config_of("Llama-2-7b-hf", "litgpt.lora", lora_r=2, lora_alpha=4, lora_query=True, lora_value=True)
    model = module.GPT(config)
    module.mark_only_lora_as_trainable(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


@functools.cache
def adapter(module):
    def make():
        gpt = pytest.importorskip(module).GPT
        model = gpt(config_of("Llama-2-7b-hf", module, adapter_start_layer=0))
        for name, parameter in model.named_parameters():
            if "gating" in name:
                torch.nn.init.ones_(parameter)
        return model

    return make


VARIATIONS = {
    "trained": (litgpt("Llama-2-7b-hf"), training(tokens)),
    "LoRA, trained": (lora, training(tokens)),
    # These keep what they made of the adapter in the first call, so that eagerly there is no second backward.
    "adapter": (adapter("litgpt.adapter"), serving(tokens)),
    "adapter v2": (adapter("litgpt.adapter_v2"), serving(tokens)),
}


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("variant", ONE)
def test_litgpt_variations(name, variant):
    check_model(variant, *VARIATIONS[name])


def generate(call, model):
    litgpt_generate = pytest.importorskip("litgpt.generate.base").generate
    model.set_kv_cache(batch_size=1)
    prompt = torch.arange(4)
    with torch.no_grad():
        return [litgpt_generate(call, prompt, max_returned_tokens=9, temperature=0.0, top_p=0.0) for _ in range(2)]


@pytest.mark.parametrize("variant", ONE)
def test_litgpt_generates_with_its_cache(variant):
    # One compilation for the prompt, one for the tokens.
    assert check(variant, litgpt("Llama-3-8B"), generate).misses == 2


#
# Hugging Face
#


def hugging_face(config_name, model_name, **config):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_name)(**config)
    config._attn_implementation = "sdpa"
    return getattr(transformers, model_name)(config).eval()


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


VIT = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}


def images():
    return (torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8),)


decoder = functools.partial(hugging_face, use_cache=False)
DECODERS = {
    "Llama": functools.partial(decoder, "LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, **SMALL),
    "Qwen2": functools.partial(decoder, "Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=2, **SMALL),
    "GPT-2": functools.partial(
        decoder, "GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=32
    ),
}
HUGGING_FACE = {
    "BERT": (functools.partial(hugging_face, "BertConfig", "BertModel", **SMALL), serving(tokens)),
    "ViT": (
        functools.partial(hugging_face, "ViTConfig", "ViTModel", image_size=8, patch_size=4, **VIT),
        serving(images),
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("variant", ONE)
def test_hugging_face(name, variant):
    check_model(variant, *HUGGING_FACE[name])


#
# torch.nn
#


def rows():
    return (torch.linspace(-1, 1, 12).view(2, 6),)


def sequences():
    return (torch.linspace(-1, 1, 48).view(2, 3, 8),)


def source_and_target():
    return (*sequences(), *sequences())


def cnn():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 5),
    )


def encoder():
    return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def transformer():
    return torch.nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)


def lazy():
    model = torch.nn.Sequential(torch.nn.LazyLinear(6), torch.nn.LazyBatchNorm1d())
    model(*rows())
    return model


def uninitialised():
    return torch.nn.LazyLinear(6)


def hooked():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, output: output + args[0])
    return model


class Dicts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = torch.nn.ParameterDict({"one": torch.randn(6), "two": torch.randn(6)})
        branches = {"left": torch.nn.Linear(6, 6), "right": torch.nn.ModuleDict({"deep": torch.nn.Linear(6, 6)})}
        self.branches = torch.nn.ModuleDict(branches)

    def forward(self, x):
        x = self.branches["left"](x) + self.branches["right"]["deep"](x)
        return x * self.gains["one"] + self.gains["two"]


class NonPersistent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 6)
        self.register_buffer("offset", torch.randn(6), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.fc(x) + self.offset if self.absent is None else x


def weight_norm():
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))


def old_weight_norm():
    return torch.nn.utils.weight_norm(torch.nn.Linear(6, 6))


def spectral_norm():
    return torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 6))


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    model = torch.nn.Linear(6, 6)
    torch.nn.utils.parametrize.register_parametrization(model, "weight", Doubled())
    return model


MODULES = {
    "CNN": (cnn, training(images)),
    # as in training, but for the gradients, which Thunder does not have
    "TransformerEncoderLayer": (encoder, serving(sequences)),
    "Transformer": (transformer, serving(source_and_target)),
    "lazy modules, initialised": (lazy, training(rows)),
    "hooks": (hooked, training(rows)),
    "ParameterDict and nested ModuleDict": (Dicts, training(rows)),
    "non-persistent and absent buffers": (NonPersistent, training(rows)),
    "parametrization": (parametrized, training(rows)),
}


@pytest.mark.parametrize(
    "name, variant", [(name, variant) for name in MODULES for variant in (ONE if name == "Transformer" else ALL)]
)
def test_modules(name, variant):
    check_model(variant, *MODULES[name])


# What Thunder itself does not compile: its error, and a part of the message.
REFUSED = {
    "LitGPT's Mixtral": (litgpt("Mixtral-8x7B-v0.1"), serving(tokens), NotImplementedError, "torch.where()"),
    "TransformerEncoderLayer, gradients": (
        encoder,
        training(sequences),
        NotImplementedError,
        "automatic registration for <function multi_head_attention_forward",
    ),
    "TransformerEncoderLayer, inference": (
        lambda: encoder().eval(),
        serving(sequences),
        NotImplementedError,
        "torch._transformer_encoder_layer_fwd",
    ),
    **{
        f"Hugging Face's {name}": (DECODERS[name], serving(tokens), InterpreterError, "'wrapper_descriptor' object")
        for name in DECODERS
    },
    "RNN": (functools.partial(torch.nn.RNN, 8, 4), training(sequences), InterpreterError, "KeyError: None"),
    "LSTM": (functools.partial(torch.nn.LSTM, 8, 4), training(sequences), InterpreterError, "KeyError: None"),
    "GRU": (functools.partial(torch.nn.GRU, 8, 4), training(sequences), InterpreterError, "KeyError: None"),
    "lazy modules, not initialised": (
        uninitialised,
        training(rows),
        InterpreterError,
        "the shape of an uninitialized parameter",
    ),
    "weight_norm, parametrization": (weight_norm, training(rows), InterpreterError, "'generator' has no len()"),
    "weight_norm": (old_weight_norm, training(rows), NotImplementedError, "torch._weight_norm"),
    "spectral_norm": (spectral_norm, training(rows), NotImplementedError, "normalize: out is not None"),
}


@pytest.fixture
def same_modes():
    """Leaves the torch function modes that Thunder goes on with where it fails within ``with torch.device(...)``."""
    before = torch._C._len_torch_function_stack()
    yield
    while torch._C._len_torch_function_stack() > before:
        torch.overrides._pop_mode()


@pytest.mark.parametrize("name", REFUSED)
def test_thunder_refuses(name, same_modes):
    make, scenario, error, message = REFUSED[name]
    model = make()
    with pytest.raises(error) as raised:
        scenario(thunder.jit(model), model)
    assert message in str(raised.value)
