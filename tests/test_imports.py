"""The import table of the project, as a test: which folder may import which (docs/architecture.md explains why).

Only our own packages, torch and safetensors are governed; other libraries are free.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# what every family of kimi_kernels stands on: dispatch, argument checks, build and calls of the compiled module
PLUMBING = [
    f"kimi_kernels._{name}"
    for name in ("dispatch", "check", "check_kda", "check_moe", "ops", "build", "compile", "sources", "env")
]

# unit -> prefixes it may import, longest prefix wins when a file is assigned to a unit
ALLOWED = {
    "kimi_kernels": ["torch", "kimi_kernels._C", "kimi_kernels.reference", *PLUMBING],
    "kimi_kernels._moe_cuda": ["torch", "kimi_kernels._moe_sm90", "kimi_kernels.reference", *PLUMBING],
    "kimi_kernels.moe": [
        "torch",
        "kimi_kernels._moe_cuda",
        "kimi_kernels._C",
        "kimi_kernels.reference",
        "kimi_kernels.routing",
        "kimi_kernels.quant",
        *PLUMBING,
    ],
    "kimi_kernels.reference": ["torch", "kimi_kernels.reference"],
    "kimi_kernels.testing": ["torch", "kimi_kernels.reference", "kimi_kernels.testing"],
    "engine.types": ["engine.types"],
    "engine.env": ["engine.types", "engine.config", "engine.env"],
    "engine.config": ["engine.types", "engine.env", "engine.config"],
    "engine.cache": ["engine.types", "engine.config", "engine.cache"],
    "engine.scheduler": ["engine.cache", "engine.types", "engine.config", "engine.scheduler"],
    "engine.distributed": ["torch", "engine.config", "engine.distributed"],
    "engine.model": ["torch", "kimi_kernels", "engine.distributed", "engine.config", "engine.model"],
    "engine.weights": [
        "torch",
        "safetensors",
        "kimi_kernels",
        "engine.model",
        "engine.distributed",
        "engine.config",
        "engine.weights",
    ],
    "engine.runner": [
        "torch",
        "kimi_kernels",
        "engine.model",
        "engine.weights",
        "engine.distributed",
        "engine.types",
        "engine.config",
        "engine.env",
        "engine.runner",
    ],
    "engine.core": [
        "engine.scheduler",
        "engine.cache",
        "engine.runner",
        "engine.types",
        "engine.config",
        "engine.env",
        "engine.core",
    ],
    "engine.text": ["engine.types", "engine.config", "engine.text"],
    "engine.server": [
        "engine.core",
        "engine.text",
        "engine.types",
        "engine.config",
        "engine.env",
        "engine.server",
    ],
    "engine.llm": ["engine.core", "engine.text", "engine.types", "engine.config", "engine.env"],
    "engine.tools": ["torch", "safetensors", "kimi_kernels", "engine", "!engine.server"],
    "engine.cli": ["engine.llm", "engine.tools", "engine.server", "engine.types", "engine.config", "engine.env"],
    "engine.__main__": ["engine.cli"],
    "engine.__init__": ["engine.llm", "engine.types"],
}
ALIAS = {  # count as "config" or "types"
    "engine.outputs": "engine.types",
    "engine.engine_config": "engine.config",
    "engine.config_fields": "engine.config",
    "engine.version": "engine.config",
}
GOVERNED = ("torch", "safetensors", "cutlass", "kimi_kernels", "engine", "tests", "bench")


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 2:
        parts.pop()
    return ".".join(parts)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def unit_of(module: str) -> str:
    for name, alias in ALIAS.items():
        if within(module, name):
            module = alias + module[len(name) :]
    hits = [unit for unit in ALLOWED if within(module, unit)]
    return max(hits, key=len) if hits else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(path: Path, package: str) -> list[str]:
    """Every absolute module name imported anywhere in the file, also inside functions and for type checking only."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # "from engine import env" means engine.env; "from engine.types import Request" stays engine.types
            found += [base if not is_module(f"{base}.{alias.name}") else f"{base}.{alias.name}" for alias in node.names]
    return found


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def sources() -> list[Path]:
    return sorted([*(ROOT / "engine").rglob("*.py"), *(ROOT / "kimi_kernels").rglob("*.py")])


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_imports_only_what_the_table_allows(path: Path) -> None:
    module = module_name(path)
    unit = unit_of(module)
    assert unit, f"{module} stands in no unit of the import table"
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for target in imports_of(path, package):
        if not any(within(target, name) for name in GOVERNED):
            continue
        for name, alias in ALIAS.items():
            if within(target, name):
                target = alias + target[len(name) :]
        banned = [rule[1:] for rule in ALLOWED[unit] if rule.startswith("!")]
        rules = [rule for rule in ALLOWED[unit] if not rule.startswith("!")]
        assert not any(within(target, rule) for rule in banned), f"{module} must not import {target}"
        assert any(within(target, rule) for rule in rules) or target == unit_root(unit), (
            f"{module} (unit {unit}) must not import {target}"
        )


def unit_root(unit: str) -> str:
    """The package itself may be imported by its members (for example kimi_kernels/__init__ names)."""
    return unit.partition(".")[0] if unit.startswith("kimi_kernels") else ""


def test_every_unit_of_the_table_exists() -> None:
    for unit in ALLOWED:
        assert is_module(unit) or (ROOT / Path(*unit.split("."))).is_dir(), f"{unit} stands in the table but not here"


def test_importing_the_package_touches_no_cuda_and_no_torch_for_the_front_end() -> None:
    import subprocess
    import sys

    code = "import engine.types, engine.text.stop, engine.engine_config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    code = "import kimi_kernels, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
