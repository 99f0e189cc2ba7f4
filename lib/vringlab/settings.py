"""Where things live and how long to wait, from the environment (`VRINGLAB_*`) and XDG folders."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG specification says that a relative path is to be ignored.
    return Path(value) if value.startswith("/") else Path.home() / fallback


def _find_root() -> Path:
    """The collection's folder: where data/ and notebooks/ are.

    Notebooks run in their own folder and papermill in its caller's, so neither the working
    folder nor the notebook's path says where the data is; the installed package does.
    """
    for folder in Path(__file__).resolve().parents:
        if (folder / "data" / "experiments").is_dir():
            return folder
    return Path.cwd()


class Settings(BaseSettings):
    """Settings of one process; a misspelt `VRINGLAB_` variable in a `.env` file is an error."""

    model_config = SettingsConfigDict(env_prefix="VRINGLAB_", extra="forbid", frozen=True)

    root: Path = Field(default_factory=_find_root, description="The collection's folder.")
    cache: Path = Field(
        default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache") / "vringlab",
        description="Images, kernels and built modules, addressed by content.",
    )
    runs: Path | None = Field(default=None, description="Run folders; ROOT/runs when unset.")
    accel: str = Field(
        default="auto",
        pattern="^(auto|kvm|tcg)$",
        description="How the embedded host's QEMU runs: auto probes /dev/kvm.",
    )
    suite: str = Field(default="trixie", description="Debian suite of the image and build root.")
    lab_cpus: int = Field(default=4, ge=4, le=64, description="vCPUs of the embedded host.")
    lab_memory_mib: int = Field(default=4096, ge=3072, description="Memory of the embedded host.")
    host_cache: str = Field(
        default="/var/cache/vringlab",
        pattern="^/[A-Za-z0-9/._-]+$",
        description="Folder on a host of the user's own that keeps the image.",
    )
    saved_labs: bool = Field(
        default=True,
        description="Whether embedded hosts are restored from a saved lab where a profile says so.",
    )
    boot_timeout: float = Field(default=240.0, gt=0, description="Seconds to reach SSH.")

    @property
    def data(self) -> Path:
        """Folder of experiments, claims, patches and recorded bundles."""
        return self.root / "data"

    @property
    def runs_dir(self) -> Path:
        """Folder in which run folders are made."""
        return self.runs if self.runs is not None else self.root / "runs"


@cache
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()
