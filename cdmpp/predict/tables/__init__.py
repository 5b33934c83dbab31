"""Predictions for tables of operators: text, CSV and Parquet files of any length, in constant memory.

A table is read in slices. A slice is predicted and encoded independently of the others, by this process, by a
service or by a Ray worker, so the answers are the same.
"""
