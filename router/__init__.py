"""Who decides: plug-in deferral rules, features, trained heads, their ONNX export and runtime."""
