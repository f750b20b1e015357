"""The manifests for Kubernetes are right by its own schema. What their pods run is tried in test_coordination.py."""

import pytest
import yaml

from tests.conftest import PROJECT

MANIFEST = PROJECT / "profiles" / "kubernetes" / "benchmark.yaml"


@pytest.fixture(scope="module")
def objects() -> dict[str, dict]:
    """What the manifest declares, by its kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_it_is_right_by_the_schema_of_kubernetes(objects, version):
    reason = "needs: pip install kubernetes-validate==1.37.0, whose 108 MB of schemas only this uses"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    for each in objects.values():
        kubernetes_validate.validate(each, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Job"] | {"specs": {}}, version, strict=True)


def test_its_parts_fit_each_other(objects):
    job, pod = objects["Job"]["spec"], objects["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = yaml.safe_load(objects["ConfigMap"]["data"]["benchmark.yaml"])
    assert job["completions"] == job["parallelism"] == config["hardware"]["nodes"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config["hardware"]["processes"]
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
