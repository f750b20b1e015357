"""Merges the environments that the runs recorded into one."""


def merge_environments(environments: list[dict]) -> dict | None:
    """One environment for all runs, with all values where they differ. `images`: each image's digests.

    A package that one row's image lacks, because only other rows need it, is no difference.
    """
    if not environments:
        return None
    names = dict.fromkeys(name for environment in environments for name in environment["packages"])
    versions = {name: _each(environment["packages"].get(name) for environment in environments) for name in names}
    packages = {name: version for name, version in versions.items() if version}
    images: dict[str, list[str]] = {}
    for environment in environments:
        if environment["image"]:
            digests = images.setdefault(environment["image"], [])
            digests += [environment["image_digest"]] * (environment["image_digest"] not in digests)
    told = ("system", "kernel", "python", "cuda", "cudnn", "nccl", "mpi", "governor", "virtual_machine", "compiler")
    values = {name: _each(environment.get(name) for environment in environments) for name in told}
    kinds = [environment.get("in_container") for environment in environments]
    values["in_container"] = _each(kind or "no container" for kind in kinds) if any(kinds) else None
    most = max(environments, key=lambda environment: len(environment.get("gpus") or ()))  # some rows see only one GPU
    return most | values | {"packages": packages, "images": images}


def _each(values) -> str | None:
    """The different values among those that should be equal, each once."""
    return " / ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None
