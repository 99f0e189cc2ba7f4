"""Series fitted to a base: modules by its Makefiles, fuzz told, misfits shown, functions found."""

from __future__ import annotations

import difflib
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vringlab.cachedir import OnStep
from vringlab.errors import InfrastructureError, UserError
from vringlab.kernels import makefiles, stack
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.buildroot import BuildRoot
from vringlab.kernels.elf import ModuleFile
from vringlab.kernels.makefiles import evaluate, index, place_of, read_config, users_of
from vringlab.kernels.patches import Side
from vringlab.kernels.series import Series, read_series
from vringlab.kernels.stack import NeedsKernel, choose_side, fit

KERNEL = BaseKernel("debian:6.12", "6.12.118+toy-amd64", "6.12.118-1", "trixie")

MAIN = """\
// SPDX-License-Identifier: GPL-2.0
#include <linux/toy.h>
#include "toy.h"

static int scale(int value)
{
\treturn value * 2;
}

int toy_send(int value)
{
\tint sum = 0;

\tsum += scale(value);
\treturn sum;
}
"""
LAST = '#include "toy.h"\n\nint toy_last(void)\n{\n\treturn 1;\n}\n'

FILES = {
    "Kbuild": "obj-y += drivers/ lib/\n",
    "drivers/Makefile": "obj-y += toy/\nobj-$(CONFIG_OFF) += off/\n",
    "drivers/toy/Makefile": """\
# SPDX-License-Identifier: GPL-2.0
obj-$(CONFIG_TOY) += toy.o
toy-y := toy_main.o \\
\t toy_last.o
toy-$(CONFIG_TOY_EXTRA) += extra/more.o
obj-$(CONFIG_TOY_ALONE) += toy-alone.o
obj-$(CONFIG_CORE) += core.o
ccflags-y += -DTOY
ifdef CONFIG_NOT_THERE
obj-m += never.o
else
obj-m += always.o
endif
""",
    "drivers/toy/toy_main.c": MAIN,
    "drivers/toy/toy_last.c": LAST,
    "drivers/toy/toy.h": "#define TOY_DEPTH 4\n",
    "drivers/toy/extra/more.c": "int more;\n",
    "drivers/toy/toy-alone.c": '#include "toy.h"\nint alone(void)\n{\n\treturn 2;\n}\n',
    "drivers/toy/core.c": "#include <linux/core.h>\nint core(void)\n{\n\treturn 3;\n}\n",
    "drivers/toy/always.c": "int always;\n",
    "drivers/off/Makefile": "obj-$(CONFIG_TOY) += off.o\n",
    "drivers/off/off.c": "int off(void)\n{\n\treturn 4;\n}\n",
    "lib/Makefile": "obj-$(CONFIG_VIRTIO_X) += virtio_x.o\nobj-m += vhost_x.o\n",
    "lib/virtio_x.c": "#include <linux/core.h>\nint x(void)\n{\n\treturn 5;\n}\n",
    "lib/vhost_x.c": "int y(void)\n{\n\treturn 6;\n}\n",
    "include/linux/toy.h": "int toy_send(int value);\n",
    "include/linux/core.h": "int core(void);\n",
    "Documentation/toy.rst": "Toy\n",
}
CONFIG = (
    "CONFIG_TOY=m\nCONFIG_TOY_EXTRA=y\nCONFIG_TOY_ALONE=m\nCONFIG_CORE=y\n# CONFIG_OFF is not set\n"
)


def silent(_line: str) -> None:
    pass


class Base:
    """A toy base: its source archive and its configuration."""

    def __init__(self, folder: Path, files: Mapping[str, str] = FILES) -> None:
        self.folder = folder
        self.files = dict(files)
        source = folder / "linux-source-6.12"
        for name, text in self.files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        archive = folder / "linux-source-6.12.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(source, "linux-source-6.12")
        headers = folder / "root/usr/src" / f"linux-headers-{KERNEL.release}"
        headers.mkdir(parents=True)
        (headers / ".config").write_text(CONFIG)
        self.root = BuildRoot(
            KERNEL, folder / "root", archive, "toy-gcc 14", "/lib/modules/x/build"
        )
        self.cache = folder / "cache"

    def series(self, *changes: Mapping[str, str], name: str = "x.patch") -> Series:
        """A patch from the files as they are to `changes`; several make a folder."""
        before = dict(self.files)
        target = self.folder / "patches"
        target.mkdir(exist_ok=True)
        for path in target.iterdir():
            path.unlink()
        for number, change in enumerate(changes, start=1):
            text = "".join(diff(path, before.get(path, ""), new) for path, new in change.items())
            before.update(change)
            (target / f"{number}-{name}").write_text(text)
        return read_series(str(target) if len(changes) > 1 else str(target / f"1-{name}"))

    def fit(
        self, series: Series, on_step: OnStep = silent, side: Side | None = None
    ) -> stack.Stack:
        return fit(series, self.root, side=side, on_step=on_step, cache=self.cache)


def diff(path: str, before: str, after: str, context: int = 3) -> str:
    old = f"a/{path}" if before else "/dev/null"
    lines = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), old, f"b/{path}", n=context
    )
    head = f"diff --git a/{path} b/{path}\n" + ("" if before else "new file mode 100644\n")
    return head + "".join(lines)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


# --- Makefiles ------------------------------------------------------------------------------


def places() -> dict[str, tuple[str, str]]:
    found = index((name, text.encode()) for name, text in FILES.items())
    config = read_config(CONFIG)
    return {
        name: (place.name, place.state)
        for name in FILES
        if name.endswith(".c")
        for place in [place_of(name, found, config)]
    }


def test_files_are_mapped_by_the_bases_own_makefiles() -> None:
    assert places() == {
        "drivers/toy/toy_main.c": ("toy", "m"),
        "drivers/toy/toy_last.c": ("toy", "m"),
        "drivers/toy/extra/more.c": ("toy", "m"),
        "drivers/toy/toy-alone.c": ("toy-alone", "m"),
        "drivers/toy/core.c": ("core", "y"),
        "drivers/toy/always.c": ("always", "m"),
        # Listed, but no Makefile above descends there.
        "drivers/off/off.c": ("off", ""),
        "lib/virtio_x.c": ("virtio_x", ""),
        "lib/vhost_x.c": ("vhost_x", "m"),
    }


def test_makefiles_of_the_kernels_kind_are_understood() -> None:
    text = """\
vhost_net-y := net.o
obj-$(CONFIG_VHOST_NET) += vhost_net.o   # comment
obj-$(subst m,y,$(CONFIG_TAP)) += builtin.o
ifeq ($(CONFIG_VHOST_NET),m)
obj-m += only_if_m.o
endif
ifneq ($(CONFIG_VHOST_NET),m)
obj-m += only_if_not.o
endif
more := a.o
more += b.o
joined-objs := $(more)
obj-m += joined.o
CFLAGS_net.o := -Wno-x
\tobj-m += a_recipe.o
"""
    found = evaluate(text, {"VHOST_NET": "m", "TAP": "m"})
    assert dict(found.objects) == {
        "vhost_net.o": "m",
        "builtin.o": "y",
        "only_if_m.o": "m",
        "joined.o": "m",
    }
    assert found.parts["vhost_net"] == ("net.o",)
    assert found.parts["joined"] == ("a.o", "b.o")
    assert found.flags == ("CFLAGS_net.o := -Wno-x",)


def test_users_of_headers_are_found_through_other_headers() -> None:
    files = {
        **FILES,
        "include/linux/outer.h": "#include <linux/core.h>\n",
        "drivers/toy/always.c": "#include <linux/outer.h>\n",
    }
    found = index((name, text.encode()) for name, text in files.items())
    assert set(users_of("include/linux/core.h", found) or ()) == {
        "drivers/toy/core.c",
        "lib/virtio_x.c",
        "drivers/toy/always.c",
    }
    # A quoted name is the file beside.
    assert set(users_of("drivers/toy/toy.h", found) or ()) == {
        "drivers/toy/toy_main.c",
        "drivers/toy/toy_last.c",
        "drivers/toy/toy-alone.c",
    }
    crowd = {f"drivers/x/{n}.c": b"#include <linux/everyone.h>\n" for n in range(300)}
    assert users_of("include/linux/everyone.h", index(iter(crowd.items()))) is None


def test_an_archive_is_indexed_once(base: Base) -> None:
    steps: list[str] = []
    first = makefiles.ensure_index(
        base.root.archive, "6.12.118-1", on_step=steps.append, cache=base.cache
    )
    assert len(steps) == 1
    again = makefiles.ensure_index(
        base.root.archive, "6.12.118-1", on_step=steps.append, cache=base.cache
    )
    assert len(steps) == 1
    assert again == first
    assert set(first.makefiles) == {"", "drivers", "drivers/toy", "drivers/off", "lib"}
    assert (
        makefiles.ensure_index(base.folder / "linux-source-6.12", "tree", on_step=steps.append)
        == first
    )


def test_a_damaged_archive_leaves_no_index(base: Base) -> None:
    base.root.archive.write_bytes(base.root.archive.read_bytes()[:200])
    with pytest.raises(InfrastructureError, match="damaged"):
        base.fit(base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}))
    assert not list((base.cache / "indexes").glob("*/index.json.gz"))


# --- a series that fits ---------------------------------------------------------------------


def test_a_patch_of_one_module_is_fitted(base: Base) -> None:
    found = base.fit(base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}))
    (module,) = found.modules
    assert (module.name, module.directory) == ("toy", "drivers/toy")
    assert module.objects == ("toy_main", "toy_last", "extra/more")
    assert module.headers == ("toy.h",)
    assert module.flags == ("ccflags-y += -DTOY",)
    assert "toy-y := toy_main.o toy_last.o extra/more.o" in module.kbuild.replace("_y", "-y")
    assert found.fuzz == ()
    assert "* 3" in found.patches[0].diff
    # Nothing is known of what the compiler did with it: the function itself is counted.
    assert [(item.function, item.module) for item in found.watched] == [("scale", "toy")]


def test_a_stack_is_applied_patch_upon_patch(base: Base) -> None:
    second = MAIN.replace("* 2", "* 3").replace("* 3", "* 4")
    found = base.fit(
        base.series(
            {"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")},
            {"drivers/toy/toy_main.c": second, "drivers/toy/toy-alone.c": "int alone;\n"},
        )
    )
    assert len(found.patches) == 2
    assert {module.name for module in found.modules} == {"toy", "toy_alone"}


def test_a_private_header_reaches_every_module_that_includes_it(base: Base) -> None:
    found = base.fit(base.series({"drivers/toy/toy.h": "#define TOY_DEPTH 8\n"}))
    assert {module.name for module in found.modules} == {"toy", "toy_alone"}


def test_a_stranger_that_only_includes_a_header_is_left_alone(base: Base) -> None:
    files = {
        **FILES,
        "lib/Makefile": "obj-m += virtio_x.o stranger.o\n",
        "lib/virtio_x.c": "#include <linux/shared.h>\nint x;\n",
        "lib/stranger.c": "#include <linux/shared.h>\nint y;\n",
        "include/linux/shared.h": "#define SHARED 1\n",
    }
    both = Base(base.folder / "both", files)
    header = {"include/linux/shared.h": "#define SHARED 2\n"}
    assert [m.name for m in both.fit(both.series(header)).modules] == ["virtio_x"]
    more = {**header, "lib/stranger.c": "#include <linux/shared.h>\nint z;\n"}
    found = both.fit(both.series(more))
    assert {m.name for m in found.modules} == {"virtio_x", "stranger"}


def test_a_public_header_of_modules_alone_is_built_with_them(base: Base) -> None:
    found = base.fit(base.series({"include/linux/toy.h": "int toy_send(int value, int more);\n"}))
    assert [module.name for module in found.modules] == ["toy"]
    assert found.headers == ("include/linux/toy.h",)


def test_files_that_are_not_built_are_left_out_and_named(base: Base) -> None:
    found = base.fit(
        base.series(
            {
                "drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3"),
                "Documentation/toy.rst": "Toys\n",
                "drivers/off/off.c": "int off(void)\n{\n\treturn 5;\n}\n",
            }
        )
    )
    assert found.patches[0].left_out == ("Documentation/toy.rst", "drivers/off/off.c")
    assert "off" not in found.patches[0].diff


def test_a_header_that_the_patch_makes_comes_with_it(base: Base) -> None:
    found = base.fit(
        base.series(
            {
                "drivers/toy/fresh.h": "#define FRESH 1\n",
                "drivers/toy/toy_main.c": MAIN.replace(
                    '#include "toy.h"\n', '#include "toy.h"\n#include "fresh.h"\n'
                ),
            }
        )
    )
    assert [module.name for module in found.modules] == ["toy"]
    assert "fresh.h" in found.patches[0].diff


def test_fuzz_is_told_and_what_is_kept_applies_exactly(base: Base) -> None:
    series = base.series({"drivers/toy/toy_main.c": MAIN.replace("sum += scale", "sum = scale")})
    other = Base(
        base.folder / "other",
        {**FILES, "drivers/toy/toy_main.c": MAIN.replace("int sum = 0;", "long sum = 0;")},
    )
    found = other.fit(series)
    assert "only with one line of context" in found.fuzz[0]
    assert "long sum" in found.patches[0].diff
    (other.folder / "exact.patch").write_text(found.patches[0].diff)
    assert other.fit(read_series(str(other.folder / "exact.patch"))).fuzz == ()


def test_an_offset_is_told(base: Base) -> None:
    series = base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")})
    moved = Base(
        base.folder / "other", {**FILES, "drivers/toy/toy_main.c": "/* one\n * two\n */\n" + MAIN}
    )
    assert "offset 3 lines" in moved.fit(series).fuzz[0]


# --- functions ------------------------------------------------------------------------------


def test_an_inlined_function_is_counted_by_what_holds_it(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shipped:
        functions = frozenset({"toy_send", "toy_last"})

    monkeypatch.setattr(BuildRoot, "shipped", lambda _self, _module: b"elf")
    monkeypatch.setattr(ModuleFile, "parse", lambda _data, _name: Shipped)
    found = base.fit(base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}))
    (watched,) = found.watched
    assert (watched.function, watched.changed) == ("toy_send", ("scale",))
    # A new function that only the patch knows is counted by what calls it.
    fresh = MAIN.replace(
        "int toy_send", "static int fresh(int v)\n{\n\treturn v;\n}\n\nint toy_send"
    )
    fresh = fresh.replace("sum += scale(value)", "sum += fresh(scale(value))")
    assert {
        w.function for w in base.fit(base.series({"drivers/toy/toy_main.c": fresh})).watched
    } == {"toy_send"}
    Shipped.functions = frozenset({"toy_last"})
    found = base.fit(base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}))
    assert found.watched == ()
    assert "inside its callers" in found.unseen["scale"]


# --- what is refused ------------------------------------------------------------------------


def test_files_of_the_kernel_itself_need_a_whole_build(base: Base) -> None:
    for change, why in (
        ({"drivers/toy/core.c": "int core;\n"}, "built into the kernel"),
        ({"drivers/toy/Makefile": "obj-m += other.o\n"}, "how the kernel is built"),
        ({"include/linux/core.h": "int core(int);\n"}, "core.c, which is built into the kernel"),
    ):
        with pytest.raises(NeedsKernel, match="beyond modules") as caught:
            base.fit(base.series(change))
        assert why in caught.value.message
        assert "whole kernel" in caught.value.remedy


def test_a_patch_of_files_that_are_not_built_is_refused(base: Base) -> None:
    with pytest.raises(UserError, match="touches no file that this base builds") as caught:
        base.fit(base.series({"Documentation/toy.rst": "Toys\n"}))
    assert "Documentation/toy.rst" in caught.value.message
    with pytest.raises(UserError, match="touches no file that this base builds") as caught:
        base.fit(base.series({"lib/virtio_x.c": "int x;\n"}))
    assert "configuration does not build lib/virtio_x.c (CONFIG_VIRTIO_X)" in caught.value.remedy


def test_a_misfit_names_hunk_and_lines(base: Base) -> None:
    series = base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")})
    text = MAIN.replace("value * 2", "value << 1").replace("static int scale", "static long scale")
    other = Base(base.folder / "other", {**FILES, "drivers/toy/toy_main.c": text})
    with pytest.raises(UserError, match=r"does not apply to drivers/toy/toy_main\.c") as caught:
        other.fit(series)
    assert "-\treturn value * 2;" in caught.value.message
    assert "return value << 1;" in caught.value.message
    assert "linux 6.12.118-1" in caught.value.message
    assert "patch 1" in caught.value.message
    assert stack.takes(series, base.root, base.cache)
    assert not stack.takes(series, other.root, other.cache)


def test_a_patch_that_the_base_has_already_is_told(base: Base) -> None:
    series = base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")})
    newer = Base(
        base.folder / "newer", {**FILES, "drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")}
    )
    with pytest.raises(UserError, match=r"has patch 1 .* already"):
        newer.fit(series)


def test_a_patch_for_another_tree_says_which_file_is_missing(base: Base) -> None:
    text = FILES["drivers/toy/Makefile"].replace("toy_last.o", "toy_last.o toy_gone.o")
    richer = Base(
        base.folder / "richer",
        {**FILES, "drivers/toy/Makefile": text, "drivers/toy/toy_gone.c": "int gone = 1;\n"},
    )
    series = richer.series({"drivers/toy/toy_gone.c": "int gone = 2;\n"})
    assert [module.name for module in richer.fit(series).modules] == ["toy"]
    with pytest.raises(UserError, match=r"no Makefile .* names drivers/toy/toy_gone\.c") as caught:
        base.fit(series)
    assert "another tree" in caught.value.remedy
    # A new file that nothing builds is no sign of that.
    with pytest.raises(UserError, match="no file that this base builds"):
        base.fit(base.series({"drivers/toy/toy_new.c": "int new;\n"}))
    listed = Base(base.folder / "listed", {**FILES, "drivers/toy/Makefile": text})
    with pytest.raises(UserError, match=r"which linux 6\.12\.118-1 does not have") as caught:
        listed.fit(series)
    assert "another tree" in caught.value.remedy


def test_sides_are_chosen_by_name_or_asked_for() -> None:
    assert choose_side(["virtio_net"], None) == "guest"
    assert choose_side(["vmw_vsock_virtio_transport_common"], None) == "guest"
    assert choose_side(["vhost", "vhost_net"], None) == "host"
    assert choose_side(["tun"], None) == "host"
    assert choose_side(["toy"], "host") == "host"
    for modules in (["toy"], ["virtio_net", "vhost_net"]):
        with pytest.raises(UserError) as caught:
            choose_side(modules, None)
        assert "--side guest" in caught.value.remedy


def test_a_side_that_is_asked_for_leaves_the_others_modules_out(base: Base) -> None:
    files = {**FILES, "lib/Makefile": "obj-m += virtio_x.o vhost_x.o\n"}
    both = Base(base.folder / "both", files)
    series = both.series({"lib/virtio_x.c": "int x;\n", "lib/vhost_x.c": "int y;\n"})
    assert {m.name for m in both.fit(series).modules} == {"virtio_x", "vhost_x"}
    assert [m.name for m in both.fit(series, side="guest").modules] == ["virtio_x"]
    assert [m.name for m in both.fit(series, side="host").modules] == ["vhost_x"]


def test_another_version_has_another_index(base: Base) -> None:
    other = replace(base.root, kernel=replace(KERNEL, version="6.12.119-1"))
    series = base.series({"drivers/toy/toy_main.c": MAIN.replace("* 2", "* 3")})
    base.fit(series)
    steps: list[str] = []
    fit(series, other, on_step=steps.append, cache=base.cache)
    assert any("6.12.119-1" in step for step in steps)
