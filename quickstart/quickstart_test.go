package quickstart

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/guest/task"
)

// The fix must apply to the project as it is in the guest, in which file times and modes may differ.
func TestFixApplies(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("git is not installed (apt-get install git)")
	}
	fix, err := filepath.Abs("task/solution/fix.patch")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("project")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"init", "--quiet"}, {"apply", "--check", fix}} {
		cmd := exec.Command(git, append([]string{"-C", dir}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// The task is one that forkvm reads without a warning, and its tests bring the tables that the project has.
func TestTaskIsSound(t *testing.T) {
	read, err := task.Open("task")
	if err != nil {
		t.Fatal(err)
	}
	if len(read.Warnings) > 0 || read.Judging.WorkTree != read.Environment.WorkDir {
		t.Errorf("warnings %q, work tree %q", read.Warnings, read.Judging.WorkTree)
	}
	for _, program := range []string{"tests/" + task.TestProgram, "solution/" + task.SolutionProgram} {
		if info, err := os.Stat(filepath.Join("task", program)); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s: %v, %v", program, info, err)
		}
	}
	ours, err := os.ReadFile("project/schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := os.ReadFile("task/tests/schema.sql")
	if err != nil || string(ours) != string(theirs) {
		t.Errorf("the tests have other tables than the project: %v", err)
	}
}

// Every file of the project is part of its history; provision.sh refuses to go on otherwise, but only minutes into a build.
func TestEveryProjectFileIsCommitted(t *testing.T) {
	script, err := os.ReadFile("provision.sh")
	if err != nil {
		t.Fatal(err)
	}
	words := map[string]bool{}
	for word := range strings.FieldsSeq(string(script)) {
		words[word] = true
	}
	project := os.DirFS("project")
	err = fs.WalkDir(project, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "__pycache__" || entry.Name() == ".pytest_cache"):
			return fs.SkipDir
		case !entry.IsDir() && !words[name]:
			t.Errorf("no commit in provision.sh names %s", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Everything comes from where the machine's own apt gets it.
func TestNoMirrorIsNamed(t *testing.T) {
	for _, name := range []string{"rootfs.sh", "provision.sh", "packages"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "://") {
			t.Errorf("%s names a host", name)
		}
	}
}
