"""Stops a test run that would test Thunder's own modules of the same names instead of this project's, and adds ``--quick``."""

from collections import Counter

import pytest

# Of these tests ``--quick`` runs only every Nth set of parameters: to compile takes Thunder seconds, and they are much alike.
EVERY = {
    "test_changes_after_compilation.py::test_readme_says_what_happens": 2,
    "test_explain_cache_misses.py::test_changes_of_inputs": 2,
    "test_explain_cache_misses.py::test_changes_of_the_model": 4,
    "test_explain_cache_misses.py::test_keeps_nothing_alive": 2,
    "test_fast_dispatch_transform.py::test_arguments": 4,
    "test_fast_dispatch_transform.py::test_global_state": 3,
    "test_fast_dispatch_transform.py::test_module_changes": 3,
    "test_fast_dispatch_transform.py::test_other_transforms": 5,
    "test_fused_prologue_transform.py::test_attributes": 3,
    "test_fused_prologue_transform.py::test_tensors": 3,
    "test_guard_blocks.py::test_tensor_guards": 3,
    "test_prologue_distributed.py::test_two_processes": 3,
    "test_prologue_dynamo.py::test_compile_notices_train_with_a_variant_in_place_of_pruning": 2,
    "test_prologue_dynamo.py::test_compile_with_dynamo": 2,
    "test_prologue_dynamo.py::test_compile_with_the_checks_pruned": 2,
    "test_prologue_dynamo.py::test_no_caching": 3,
    "test_prologue_fuzz.py::test_a_mutant_is_noticed": 3,
    "test_prologue_models.py::test_hugging_face": 2,
    "test_prologue_models.py::test_litgpt": 5,
    "test_prologue_models.py::test_litgpt_variations": 4,
    "test_prologue_models.py::test_modules": 5,
    "test_prologue_models.py::test_thunder_refuses": 4,
    "test_prologue_training.py::test_autocast": 2,
    "test_prologue_training.py::test_batch_norm": 2,
    "test_prologue_training.py::test_evaluation_between_epochs": 2,
    "test_prologue_training.py::test_optimizer_steps": 3,
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
        (left_out if seen[name] % EVERY.get(name, 1) else run).append(item)
        seen[name] += 1
    # That a name is out of date must not go unnoticed: what it stands for would all run.
    files = {item.path.name for item in items} if not any("::" in arg for arg in config.args) else set()
    if unknown := [name for name in EVERY if name.partition("::")[0] in files and name not in seen]:
        raise pytest.UsageError(f"conftest.py: EVERY names tests that do not exist: {', '.join(unknown)}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = run
