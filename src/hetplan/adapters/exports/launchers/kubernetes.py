"""Export for Kubernetes: a JobSet, or a TrainJob of Kubeflow together with its training runtime."""

import json
from textwrap import indent

from hetplan.adapters.exports.launchers.start import Start
from hetplan.adapters.exports.scripts import torchrun

FILES = """apiVersion: v1
kind: ConfigMap
metadata: {{name: {name}}}
data:
  plan.json: |
{plan}
  node.sh: |
{script}
"""
JOB_SET = """\
network: {{enableDNSHostnames: true, subdomain: {name}}}
failurePolicy: {{maxRestarts: 0}}
replicatedJobs:
{jobs}"""
# Ranks exchange data through /dev/shm. Unless a pod mounts memory there, it has only 64 MiB of it.
JOB = """\
- name: nodes-{number}
  replicas: 1
  template:
    spec:
      parallelism: {nodes}
      completions: {nodes}
      completionMode: Indexed
      backoffLimit: 0
      template:
        spec:
          restartPolicy: Never
          nodeSelector: {selectors}
          containers:
          - name: node
            image: {image}
            command: {command}
            resources: {resources}
            volumeMounts:
            - {{name: files, mountPath: /hetplan}}
            - {{name: memory, mountPath: /dev/shm}}
          volumes:
          - {{name: files, configMap: {{name: {name}}}}}
          - {{name: memory, emptyDir: {{medium: Memory}}}}
"""
# Launcher -> the objects that follow the ConfigMap of the files.
OBJECTS = {
    "jobset": """---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: {name}}}
spec:
{spec}""",
    "kubeflow": """---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {{name: {name}}}
spec:
  template:
    spec:
{runtime}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: {name}}}
spec:
  runtimeRef: {{name: {name}, kind: TrainingRuntime}}
""",
}


def kubernetes(start: Start) -> dict[str, str]:
    """File name -> text of Kubernetes' objects: a ConfigMap with the plan and `node.sh`, and one
    replicated job for each of `start.groups`, with one pod per node."""
    # Rank 0 is on the first node, which is the first pod of the first replicated job. JobSet names
    # pods by job set, replicated job, job and pod, and their domain by the subdomain.
    begin = f"export MASTER_ADDR={start.name}-nodes-0-0-0.{start.name}; "
    jobs = []
    for number, ((kind, ranks), nodes) in enumerate(start.groups.items()):
        resources = {"limits": {"nvidia.com/gpu": ranks}} if start.gpus else {}
        job = JOB.format(
            number=number,
            name=start.name,
            nodes=len(nodes),
            selectors=json.dumps(start.selectors(kind, "nvidia.com/gpu.product")),
            image=json.dumps(start.launcher.image),
            command=json.dumps(start.task("JOB_COMPLETION_INDEX", nodes, "/hetplan", begin)),
            resources=json.dumps(resources),
        )
        jobs.append(job)
    job_set = JOB_SET.format(name=start.name, jobs="".join(jobs))
    plan = json.dumps(start.plan.model_dump(mode="json"), indent=1)
    script = torchrun(start.plan, variables=start.launcher.env)
    files = FILES.format(
        name=start.name, plan=indent(plan, " " * 4), script=indent(script, " " * 4)
    )
    # A JobSet has the replicated jobs in `spec`, a training runtime deeper, in `runtime`.
    objects = OBJECTS[start.launcher.kind].format(
        name=start.name, spec=indent(job_set, " " * 2), runtime=indent(job_set, " " * 6)
    )
    return {"job.yaml": files + objects}
