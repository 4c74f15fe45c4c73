// Package task reads task directories: what environment a policy works in, and how
// its work is judged. The form is Harbor's, schema 1.3; what only forkvm does is in
// a section of its own:
//
//	[forkvm.judging]
//	where = "both"                  # or "fork", "transplant"
//	work_tree = "/srv/project"      # transplanted without its .git
//	exclude = ["*.log"]             # left out of the work tree
//	artifacts = ["/srv/out"]        # transplanted too; instead of Harbor's list
//	score = "reward"                # or "exit_code", "junit"
//	junit = "/logs/verifier/junit.xml"
//	toolchain = "fixed"             # or "free": the policy may replace programs
//	protect = ["/opt/checker"]      # beside the toolchain
//	artifact_bytes = "1G"           # of all artifacts together
//	artifact_entries = 100000
//
// Names of older versions of the schema are read as well. An unknown name in our
// section is an error, elsewhere a warning: newer versions add some.
package task
