"""Selection of an engine by its name; the module of an engine is imported when it is used."""

from __future__ import annotations

from wanma.engines.engine import Engine
from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections.engines import ENGINES


def get_engine(name: str) -> Engine:
    """Return the engine with this name.

    Raises:
        JobError: there is no such engine.
    """
    if name == "local":
        from wanma.engines.local.engine import LocalEngine

        return LocalEngine()
    if name == "slurm":
        from wanma.engines.slurm.engine import SlurmEngine

        return SlurmEngine()
    if name == "ssh":
        from wanma.engines.ssh.engine import SshEngine

        return SshEngine()
    if name == "ray":
        from wanma.engines.ray.engine import RayEngine

        return RayEngine()
    if name == "kubernetes":
        from wanma.engines.kubernetes.engine import KubernetesEngine

        return KubernetesEngine()
    raise JobError(
        f"there is no engine '{name}'.{did_you_mean(name, ENGINES)}", f"engines: {', '.join(ENGINES)}"
    )
