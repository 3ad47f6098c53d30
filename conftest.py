"""Stops a test run that would test Thunder's own modules of the same names instead of this project's, and adds ``--quick``."""

from collections import Counter

import pytest

# Of these tests ``--quick`` runs only every Nth set of parameters, and with 0 none: to compile takes Thunder seconds, and
# they are much like others.
EVERY = {
    "test_benchmark_prologue.py::test_calls": 0,
    "test_benchmark_prologue.py::test_litgpt_model_through_the_command_line": 0,
    "test_changes_after_compilation.py::test_readme_says_what_happens": 3,
    "test_explain_cache_misses.py::test_changes_of_inputs": 0,
    "test_explain_cache_misses.py::test_changes_of_the_model": 4,
    "test_explain_cache_misses.py::test_keeps_nothing_alive": 3,
    "test_explain_cache_misses.py::test_recompile_storm": 2,
    "test_extraction_only_prologue_transform.py::test_either_order_with_lora": 3,
    "test_extraction_only_prologue_transform.py::test_litgpt": 0,
    "test_fast_dispatch_transform.py::test_arguments": 4,
    "test_fast_dispatch_transform.py::test_global_state": 3,
    "test_fast_dispatch_transform.py::test_module_changes": 3,
    "test_fast_dispatch_transform.py::test_other_transforms": 5,
    "test_fast_dispatch_transform.py::test_outputs": 3,
    "test_fused_prologue_transform.py::test_attributes": 7,
    "test_fused_prologue_transform.py::test_composition": 3,
    "test_fused_prologue_transform.py::test_composition_with_lora": 3,
    "test_fused_prologue_transform.py::test_is_collected_as_promptly_as_without": 3,
    "test_fused_prologue_transform.py::test_names_of_arguments": 3,
    "test_fused_prologue_transform.py::test_tensors": 7,
    "test_guard_blocks.py::test_tensor_guards": 3,
    "test_overlay.py::test_editable_install": 0,
    "test_overlay.py::test_pytest_stops_when_the_overlay_is_not_active": 2,
    "test_overlay.py::test_thunder_from_a_source_checkout": 0,
    "test_prologue_distributed.py::test_two_processes": 5,
    "test_prologue_dynamo.py::test_compile_notices_train_with_a_variant_in_place_of_pruning": 3,
    "test_prologue_dynamo.py::test_compile_with_dynamo": 3,
    "test_prologue_dynamo.py::test_compile_with_the_checks_pruned": 3,
    "test_prologue_dynamo.py::test_no_caching": 3,
    "test_prologue_dynamo.py::test_thunderfx": 0,
    "test_prologue_fuzz.py::test_a_mutant_is_noticed": 3,
    "test_prologue_models.py::test_hugging_face": 0,
    "test_prologue_models.py::test_litgpt": 16,
    "test_prologue_models.py::test_litgpt_generates_with_its_cache": 0,
    "test_prologue_models.py::test_litgpt_variations": 0,
    "test_prologue_models.py::test_modules": 5,
    "test_prologue_models.py::test_thunder_refuses": 7,
    "test_prologue_training.py::test_autocast": 3,
    "test_prologue_training.py::test_batch_norm": 3,
    "test_prologue_training.py::test_buffers_set_by_the_epilogue": 3,
    "test_prologue_training.py::test_checkpoint": 3,
    "test_prologue_training.py::test_tied_weights": 3,
    "test_prologue_training.py::test_evaluation_between_epochs": 3,
    "test_prologue_training.py::test_gradual_unfreezing": 3,
    "test_prologue_training.py::test_optimizer_steps": 3,
    "test_prologue_verification.py::test_names_what_has_changed": 3,
    "test_prologue_verification.py::test_with_lora": 3,
    "test_prologue_with_transforms.py::test_every_order": 5,
}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="of tests that are much alike, run some (see conftest.py)")


def pytest_configure(config):
    try:
        from thunder_overlay.status import inactive_reason
    except ModuleNotFoundError:
        reason = "thunder-prologue is not installed in this environment; run `pip install -e '.[demo,test]'`"
    else:
        reason = inactive_reason()
    if reason is not None:
        pytest.exit(f"the thunder overlay is not active: {reason}", returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(tryfirst=True)  # before -k
def pytest_collection_modifyitems(config, items):
    if not config.option.quick:
        return
    seen, run, left_out = Counter(), [], []
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        every = EVERY.get(name, 1)
        (left_out if not every or seen[name] % every else run).append(item)
        seen[name] += 1
    # That a name is out of date must not go unnoticed: what it stands for would all run.
    files = {item.path.name for item in items} if not any("::" in arg for arg in config.args) else set()
    if unknown := [name for name in EVERY if name.partition("::")[0] in files and name not in seen]:
        raise pytest.UsageError(f"conftest.py: EVERY names tests that do not exist: {', '.join(unknown)}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = run
