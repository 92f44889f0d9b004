"""The trainer's settings by subject. Each group adds its fields to the one before.

Why a chain: msgspec does not combine structs that have fields of their own.
"""
