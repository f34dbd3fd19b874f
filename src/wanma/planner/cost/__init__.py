"""How long a plan takes: operators, links, pipelines and whole steps on given devices; energy and price."""
