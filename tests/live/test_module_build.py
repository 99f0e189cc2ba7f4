"""Every arm of the collection, really built for the image's kernel (no virtual machine)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vringlab.image.build import ensure_image
from vringlab.kernels.base import BaseKernel, resolve
from vringlab.kernels.buildroot import WORK, BuildRoot, ensure_buildroot
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.module import BuiltModule, build_module
from vringlab.kernels.patches import Arm, arm_names, load_arm, parse_patch
from vringlab.kernels.source import MODULES, ensure_source
from vringlab.settings import settings

SPEC = "debian:6.12"
EXPERIMENTS = (
    "vsock-direct-enqueue",
    "virtio-net-napi-tx",
    "vhost-net-rx-poll",
    "vsock-skb-merge",
)
SHIPPED = {
    ("vsock-direct-enqueue", "direct"),
    ("virtio-net-napi-tx", "stock"),
    ("vhost-net-rx-poll", "shipped"),
    ("vsock-skb-merge", "no-merge"),
}
ARMS = [
    ("vsock-direct-enqueue", "queued"),
    ("vsock-direct-enqueue", "rfc-v1"),
    ("vsock-direct-enqueue", "direct"),
    ("virtio-net-napi-tx", "stock"),
    ("virtio-net-napi-tx", "rfc"),
    ("virtio-net-napi-tx", "merged"),
    ("vhost-net-rx-poll", "always-polling"),
    ("vhost-net-rx-poll", "shipped"),
    ("vhost-net-rx-poll", "2014"),
    ("vsock-skb-merge", "no-merge"),
    ("vsock-skb-merge", "merge"),
]

# A cold cache fetches some 300 MB first.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def kernel() -> BaseKernel:
    image = ensure_image(on_step=print)
    return resolve(SPEC, suite=image.suite, release=image.release, version=image.version)


@pytest.fixture(scope="module")
def root(kernel: BaseKernel) -> BuildRoot:
    return ensure_buildroot(kernel, on_step=print)


@pytest.fixture(scope="module")
def fresh(root: BuildRoot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache without modules: what is tested is a build, not one of last week's.

    The kernel's source is the one thing taken from the real cache; reading it takes longest.
    """
    ensure_source(root.archive, root.kernel.version, on_step=print)
    cache = tmp_path_factory.mktemp("cache")
    (cache / "sources").symlink_to(settings().cache / "sources")
    return cache


@pytest.fixture(scope="module")
def built(root: BuildRoot, fresh: Path) -> dict[tuple[str, str], BuiltModule]:
    found = {}
    for experiment, name in ARMS:
        arm = load_arm(experiment, SPEC, name)
        begin = time.monotonic()
        module = build_module(root, arm, on_step=print, cache=fresh)
        assert not module.cached
        print(f"{experiment}/{name}: {time.monotonic() - begin:.2f} s")
        found[experiment, name] = module
    return found


def test_every_arm_on_disk_is_one_that_is_built_here() -> None:
    on_disk = [
        (experiment, name) for experiment in EXPERIMENTS for name in arm_names(experiment, SPEC)
    ]
    assert sorted(on_disk) == sorted(ARMS)


@pytest.mark.parametrize(("experiment", "name"), ARMS)
def test_an_arm_compiles_without_warnings_for_the_very_kernel(
    built: dict[tuple[str, str], BuiltModule], kernel: BaseKernel, experiment: str, name: str
) -> None:
    module = built[experiment, name]
    assert module.warnings == ()
    assert module.vermagic.split()[0] == module.release == kernel.release
    assert len(bytes.fromhex(module.build_id)) == 20
    sources = [file for file in MODULES[module.module].files if file.endswith(".c")]
    expected = [] if (experiment, name) in SHIPPED else sources
    assert list(module.patched_files) == expected
    assert module.side == ("host" if experiment == "vhost-net-rx-poll" else "guest")


def test_modinfo_says_the_same(
    built: dict[tuple[str, str], BuiltModule], root: BuildRoot, kernel: BaseKernel
) -> None:
    for (experiment, name), module in built.items():
        argv = ["modinfo", f"{WORK}/{module.path.name}"]
        said = dict(
            line.split(":", 1) for line in root.run(argv, module.path.parent).stdout.splitlines()
        )
        assert said["vermagic"].strip() == module.vermagic.strip()
        assert said["vermagic"].split()[0] == kernel.release
        assert said["name"].strip() == module.module
        assert said["vringlab_arm"].strip() == f"{experiment}/{name}"


def test_arms_differ_in_build_id_and_in_code(built: dict[tuple[str, str], BuiltModule]) -> None:
    assert len({module.build_id for module in built.values()}) == len(ARMS)
    # Two experiments on one module have its shipped code in common, and nothing else.
    patched = {arm for arm in ARMS if arm not in SHIPPED}
    codes = {module.text_sha256 for arm, module in built.items() if arm in patched}
    shipped = {module.text_sha256 for arm, module in built.items() if arm in SHIPPED}
    assert len(codes) == len(patched)
    assert not codes & shipped
    assert len(shipped) == len({built[arm].module for arm in SHIPPED})


@pytest.mark.parametrize("name", sorted(MODULES))
def test_an_unpatched_module_has_the_machine_code_of_the_distributions(
    root: BuildRoot, kernel: BaseKernel, fresh: Path, name: str
) -> None:
    """Building outside of the kernel's tree changes nothing; the table says how, for each."""
    shipped = root.shipped(MODULES[name])
    assert shipped is not None
    header = f"Title: as shipped\nModule: {name}\nSide: guest\nServes: 6.12 <= version < 6.13\n"
    patch = parse_patch(f"{header}Diff: none\n\n", Path("shipped.patch"))
    arm = Arm("table-of-modules", kernel.name, "shipped", name, "guest", (patch,))
    module = build_module(root, arm, on_step=print, cache=fresh)
    assert module.text_sha256 == ModuleFile.parse(shipped, name).text_sha256
    assert module.warnings == ()


def test_the_arms_as_shipped_are_just_that(
    built: dict[tuple[str, str], BuiltModule], root: BuildRoot
) -> None:
    for arm, module in built.items():
        shipped = root.shipped(MODULES[module.module])
        assert shipped is not None
        same = ModuleFile.parse(shipped, module.module).text_sha256 == module.text_sha256
        assert same == (arm in SHIPPED)


def test_a_second_build_finds_all_of_it(
    built: dict[tuple[str, str], BuiltModule], kernel: BaseKernel, fresh: Path
) -> None:
    steps: list[str] = []
    root = ensure_buildroot(kernel, on_step=steps.append)
    for (experiment, name), module in built.items():
        twin = load_arm(experiment, SPEC, f"{name}.aa")
        again = build_module(root, twin, on_step=steps.append, cache=fresh)
        assert again.cached
        assert again.provenance() == module.provenance()
    assert steps == []


def test_a_build_elsewhere_gives_the_same_file(
    built: dict[tuple[str, str], BuiltModule], root: BuildRoot
) -> None:
    """So that a run's build-ids can be compared with another machine's."""
    for (experiment, name), module in built.items():
        other = build_module(root, load_arm(experiment, SPEC, name), on_step=print)
        assert other.path != module.path
        assert (other.sha256, other.build_id) == (module.sha256, module.build_id)
