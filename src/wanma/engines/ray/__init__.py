"""Ray engine: a placement group whose bundles each have an actor that starts one supervisor on its node.

Ray places and holds the nodes; recovery stays wanma's. Ray is asked by `bridge`, a process of its own: a lost
head node ends processes that are connected to Ray, and no supervisor may be one of them.
"""
