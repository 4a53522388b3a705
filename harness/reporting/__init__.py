"""Turns plans, runs and results into text for people and programs: terminal, page, JUnit, JSON, stories, and a script
that shows a finding. Input: results and records. Output: text. Nothing is judged here."""
