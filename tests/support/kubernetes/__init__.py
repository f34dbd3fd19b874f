"""A strict stand-in for a Kubernetes cluster: API server, controllers, scheduler and kubelets."""
