"""Many runs that differ in a few settings: which they are (plan), what became of them (results), running them
(runner), and what they show together (statistics). `titan-prores sweep` is its command line."""
