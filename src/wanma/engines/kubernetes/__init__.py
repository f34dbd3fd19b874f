"""Kubernetes engine: a JobSet or an Indexed Job whose pods each run one supervisor, found again by its name.

Run directory, code and data lie on one PersistentVolumeClaim that all pods mount; what is not there is sent
and fetched through a pod.
"""
