"""Turns plans, runs and results into text for people and programs: terminal, page, JUnit, JSON, stories, and a script
that shows a finding.

Input: results and records. Output: text. No verdict is made or changed here."""
