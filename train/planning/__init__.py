"""The trainer's part of the plan, made before any rank starts; imports no torch."""
