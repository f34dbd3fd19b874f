"""Commands that look at runs from outside: files for Prometheus and Grafana, diagnosis."""
