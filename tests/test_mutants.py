"""The tests have teeth: each small edit of tests/mutants.py breaks the test that is named for it."""

import importlib
import inspect
import itertools
import sys
import types

import pytest
from conftest import ROOT
from mutants import MUTANTS


def edited(file, old, new):
    """The script with `old` replaced, imported under another name."""
    source = (ROOT / file).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file}"
    module = types.ModuleType(f"mutant_of_{file.removesuffix('.py')}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), f"mutant of {file}", "exec"), module.__dict__)
    return module


def calls_of(test):
    """The argument sets that pytest would call a test with, from its parametrize marks."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    axes = []
    for mark in marks:
        names = [name.strip() for name in mark.args[0].split(",")]
        axes.append([dict(zip(names, values if len(names) > 1 else (values,))) for values in mark.args[1]])
    for combination in itertools.product(*axes):
        yield {name: value for values in combination for name, value in values.items()}


def call(name, request, replaced=None):
    """Run the test of that name, file::test, with every argument set that pytest would give it.

    Arguments that are modules become what `replaced` has for them.
    """
    file, test_name = name.split("::")
    test = getattr(importlib.import_module(file.removesuffix(".py")), test_name)
    for arguments in calls_of(test):
        modules = {key: value for key, value in arguments.items() if isinstance(value, types.ModuleType)}
        arguments |= {key: (replaced or {}).get(value, value) for key, value in modules.items()}
        wanted = set() if hasattr(test, "hypothesis") else inspect.signature(test).parameters.keys() - arguments.keys()
        fixtures = {name: request.getfixturevalue(name) for name in wanted}
        if "tmp_path" in wanted:  # a folder of its own for every argument set
            fixtures["tmp_path"] = request.getfixturevalue("tmp_path_factory").mktemp("case")
        if "clean" in wanted:
            fixtures["clean"] = request.getfixturevalue("tmp_path_factory").mktemp("case")
            request.getfixturevalue("monkeypatch").chdir(fixtures["clean"])
        test(**arguments, **fixtures)


@pytest.mark.parametrize("file, old, new, name", MUTANTS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MUTANTS)])
def test_every_mutant_is_killed(file, old, new, name, monkeypatch, request):
    mutant = edited(file, old, new)
    importlib.import_module(name.split("::")[0].removesuffix(".py"))
    for place in list(sys.modules.values()):  # the test's module, and those whose helpers it uses
        original = getattr(place, file.removesuffix(".py"), None)
        if getattr(place, "__name__", "").startswith("test_") and isinstance(original, types.ModuleType):
            monkeypatch.setattr(place, file.removesuffix(".py"), mutant)
    with pytest.raises((Exception, pytest.fail.Exception)):  # an assertion, or an error that the edit causes
        call(name, request, {importlib.import_module(file.removesuffix(".py")): mutant})


@pytest.mark.parametrize("name", sorted({name for *_, name in MUTANTS}))
def test_without_the_edit_the_named_test_passes(name, request):
    """So that a mutant is killed by what it computes, and not by the way its test is called here."""
    call(name, request)


def test_there_are_mutants_of_every_script():
    assert len(MUTANTS) >= 10
    assert {file for file, *_ in MUTANTS} == {path.name for path in ROOT.glob("*.py")}
