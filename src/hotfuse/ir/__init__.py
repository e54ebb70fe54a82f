"""The hypergraph: types, graph, text form, verifier, rewriting, structural hash."""
