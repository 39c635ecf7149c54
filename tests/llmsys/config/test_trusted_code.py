"""Code runs when the user has consented to its bytes: by digest, by the variable, or by a record.
None of it runs before.
"""

import hashlib
import importlib.util
import logging
import os
import py_compile
from pathlib import Path

import pytest

from llmsys.config.harness import HarnessConfig
from llmsys.config.loading.python_object import load_python_object
from llmsys.config.loading.trusted_code import (
    PACKAGE,
    get_record_path,
    require_trusted_code,
    require_trusted_tasks,
    trust_code_of_command,
)
from llmsys.config.python_code import PythonCode
from llmsys.config.section import Section
from llmsys.errors import ConfigError, UntrustedCodeError

VARIABLE = "LLMSYS_TRUST_CODE"


@pytest.fixture(autouse=True)
def fresh_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def write_code(path: Path, more: str = "") -> PythonCode:
    path.write_text(
        "from llmsys.config.section import Section\n"
        f"open('mark', 'a').write({path.name!r})\n"
        f"class Own(Section): ...\n{more}"
    )
    return PythonCode(path=f"{path.name}:Own")


def has_run() -> bool:
    return Path("mark").exists()


def compute_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_without_consent_the_answer_has_path_and_digest_and_nothing_ran(tmp_path: Path) -> None:
    code = write_code(tmp_path / "own.py")
    with pytest.raises(UntrustedCodeError) as caught:
        load_python_object(code, Section, "optimizer")
    digest = compute_digest(tmp_path / "own.py")
    assert f"\n  {digest}  own.py\n" in str(caught.value)
    assert str(caught.value).startswith("optimizer names code that would run")
    assert f"{VARIABLE}={digest}" in str(caught.value)
    assert not has_run()


def test_consent_of_a_command_is_recorded_and_holds_for_these_bytes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write_code(tmp_path / "own.py")
    trust_code_of_command()
    load_python_object(code, Section, "optimizer")
    assert has_run()
    [line] = get_record_path().read_text().splitlines()
    assert line.startswith(f"{compute_digest(tmp_path / 'own.py')}  ")
    assert get_record_path().stat().st_mode & 0o077 == 0

    monkeypatch.delenv(VARIABLE)
    load_python_object(code, Section, "optimizer")
    # the same bytes elsewhere
    (tmp_path / "copy.py").write_bytes((tmp_path / "own.py").read_bytes())
    load_python_object(PythonCode(path="copy.py:Own"), Section, "optimizer")
    write_code(tmp_path / "own.py", "#")
    Path("mark").unlink()
    with pytest.raises(UntrustedCodeError, match=r"own\.py"):
        load_python_object(code, Section, "optimizer")
    assert not has_run()


def test_the_same_bytes_are_recorded_once(tmp_path: Path) -> None:
    code = write_code(tmp_path / "own.py")
    trust_code_of_command()
    for _ in range(2):
        load_python_object(code, Section, "optimizer")
    assert len(get_record_path().read_text().splitlines()) == 1


def test_a_record_keeps_what_was_trusted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [write_code(tmp_path / name, f"# {name}") for name in ("one.py", "other.py")]
    for code in codes:
        trust_code_of_command()
        load_python_object(code, Section, "optimizer")
        monkeypatch.delenv(VARIABLE)
    assert len(get_record_path().read_text().splitlines()) == 2
    for code in codes:
        load_python_object(code, Section, "optimizer")


def test_the_variable_takes_digests_and_gets_those_that_were_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of other hosts, which have no record, inherit consent by the variable."""
    first, second = write_code(tmp_path / "a.py"), write_code(tmp_path / "b.py", "#")
    digests = [compute_digest(tmp_path / name) for name in ("a.py", "b.py")]
    environment = {VARIABLE: digests[0], "XDG_CONFIG_HOME": str(tmp_path / "config")}
    monkeypatch.setenv(VARIABLE, digests[0])
    load_python_object(first, Section, "optimizer")
    with pytest.raises(UntrustedCodeError, match=r"b\.py"):
        load_python_object(second, Section, "schedule")
    record = get_record_path()
    record.parent.mkdir(parents=True)
    record.write_text(f"{digests[1]}  b.py\n")
    require_trusted_code([(Path("b.py"), (tmp_path / "b.py").read_bytes())], "x", environment)
    assert environment[VARIABLE] == ",".join(sorted(digests))


@pytest.mark.parametrize("value", ["yes", "0", "ABC", "true,1"])
def test_another_value_of_the_variable_is_an_error_and_no_consent(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = write_code(tmp_path / "own.py")
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="is no sha256 of 64 hex digits"):
        load_python_object(code, Section, "optimizer")
    assert not has_run()


def test_further_sources_need_consent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = write_code(tmp_path / "own.py").model_copy(update={"sources": (Path("words.txt"),)})
    Path("words.txt").write_text("a")
    monkeypatch.setenv(VARIABLE, compute_digest(tmp_path / "own.py"))
    with pytest.raises(UntrustedCodeError, match=r"words\.txt"):
        load_python_object(code, Section, "optimizer")
    assert not has_run()


def test_no_package_of_a_module_runs_before_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llmsys_foreign"
    (package / "inner").mkdir(parents=True)
    for path in (package / "__init__.py", package / "inner" / "__init__.py"):
        path.write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write('package')\n")
    write_code(package / "inner" / "own.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = PythonCode(path="llmsys_foreign.inner.own:Own")
    with pytest.raises(UntrustedCodeError) as caught:
        load_python_object(code, Section, "optimizer")
    assert str(caught.value).count(".py\n") == 3
    assert not has_run()
    # consent to the module alone is none to its packages
    monkeypatch.setenv(VARIABLE, compute_digest(package / "inner" / "own.py"))
    with pytest.raises(UntrustedCodeError, match=r"__init__\.py"):
        load_python_object(code, Section, "optimizer")
    assert not has_run()


def test_what_runs_is_the_source_and_no_compiled_file_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "llmsys_compiled.py"
    write_code(own)
    hostile = tmp_path / "hostile.py"
    hostile.write_text("open('hostile', 'w')\n")
    cached = importlib.util.cache_from_source(str(own))
    py_compile.compile(
        str(hostile), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(VARIABLE, compute_digest(own))
    load_python_object(PythonCode(path="llmsys_compiled:Own"), Section, "optimizer")
    assert has_run()
    assert not Path("hostile").exists()


def test_code_of_llmsys_needs_no_consent_but_that_beside_it_does(tmp_path: Path) -> None:
    code = PythonCode(path="llmsys.doctor.pairs.own_blocks:SquaredRelu")
    assert load_python_object(code, Section, "model.feed_forward")
    assert VARIABLE not in os.environ or not os.environ[VARIABLE]
    # A package whose name begins alike is another one.
    beside = PACKAGE.with_name("llmsys_more") / "own.py"
    with pytest.raises(UntrustedCodeError, match="llmsys_more"):
        require_trusted_code([(beside, b"")], "model.feed_forward")


def test_task_files_of_the_harness_need_consent(tmp_path: Path) -> None:
    """Their YAML names functions, and its Jinja texts are rendered without a sandbox."""
    folder = tmp_path / "tasks" / "inner"
    folder.mkdir(parents=True)
    files = {"tasks/a.yaml": "task: a", "tasks/inner/utils.py": "", "tasks/inner/b.yml": "task: b"}
    for name, text in files.items():
        Path(name).write_text(text)
    asked = HarnessConfig(tasks=("a",), include_path=Path("tasks"))
    assert asked.include_path is not None
    with pytest.raises(UntrustedCodeError) as caught:
        require_trusted_tasks(asked.include_path, "evaluation.tasks.0")
    for name in files:
        assert f"  {name}\n" in str(caught.value)


def test_a_record_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = write_code(tmp_path / "own.py")
    (tmp_path / "config").write_text("no folder")
    trust_code_of_command()
    with caplog.at_level(logging.WARNING):
        load_python_object(code, Section, "optimizer")
    assert "so the next command needs --trust-code again" in caplog.text
    assert has_run()
