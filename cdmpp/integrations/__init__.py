"""Predictions inside other tools: TVM's search, Vidur, SGLang, LLMServingSim, scikit-learn, Optuna.

An integration fulfils an interface of another project. What works without that project belongs elsewhere.
"""
