package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// source is one of our packages.
type source struct {
	path    string // relative to the module
	name    string
	imports []string // of the package itself, not of its tests
	files   []string // all Go files, tests too
}

// sources asks the go command for all our packages.
func sources(t *testing.T) []source {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Name,Dir,Imports,GoFiles,CgoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles", module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var all []source
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Name, Dir                                                 string
			Imports, GoFiles, CgoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
		}
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		path, _ := relative(p.ImportPath)
		s := source{path: path, name: p.Name, imports: p.Imports}
		for _, files := range [][]string{p.GoFiles, p.CgoFiles, p.IgnoredGoFiles, p.TestGoFiles, p.XTestGoFiles} {
			for _, name := range files {
				s.files = append(s.files, filepath.Join(p.Dir, name))
			}
		}
		all = append(all, s)
	}
	if len(all) < 10 {
		t.Fatalf("found %d packages: the test looks in the wrong place", len(all))
	}
	return all
}

func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		r, ok := ruleFor(s.path)
		if !ok {
			t.Errorf("package %q has no rule: decide in rules.go what it may import", s.path)
			continue
		}
		for _, target := range s.imports {
			if !standard(target) && !r.allows(target) {
				t.Errorf("%q imports %s, which the rule for %s does not allow: %s", s.path, target, r.packages, r.why)
			}
		}
		for _, o := range owners {
			for _, target := range s.imports {
				if hasPathPrefix(target, o.path) && !coversAny(o.by, s.path) {
					t.Errorf("%q imports %s, which only %s may: %s", s.path, target, strings.Join(o.by, ", "), o.why)
				}
			}
		}
	}
}

// Concrete devices are named in one place, so that there is one list of them.
func TestOneListOfDevices(t *testing.T) {
	for _, s := range sources(t) {
		// The other end of a card's wire has its addresses.
		if covers("internal/machine/...", s.path) || covers("devices/...", s.path) || covers("bench/...", s.path) || covers("internal/tapnet", s.path) {
			continue
		}
		for _, target := range s.imports {
			path, ours := relative(target)
			if ours && covers("devices/*", path) && path != "devices/virtio" {
				t.Errorf("%q imports the device %s; only internal/machine names devices", s.path, path)
			}
		}
	}
}

func TestUnsafe(t *testing.T) {
	eachFile(t, func(path string, file *ast.File) {
		stem := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(path), ".go"), "_test")
		stem = strings.TrimSuffix(stem, "_amd64")
		for _, spec := range file.Imports {
			switch spec.Path.Value {
			case `"unsafe"`:
				if !strings.HasSuffix(stem, "_unsafe") {
					t.Errorf("%s imports unsafe: it belongs in a file named *_unsafe.go, with the reason why it is sound", path)
				}
			case `"C"`:
				t.Errorf("%s uses cgo: our programs are static and pure Go", path)
			}
		}
	})
}

// Packages do nothing by being imported.
func TestNoInit(t *testing.T) {
	eachFile(t, func(path string, file *ast.File) {
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == "init" {
				t.Errorf("%s has an init function: who needs it calls it", path)
			}
		}
	})
}

func TestPackageNamesSaySomething(t *testing.T) {
	for _, s := range sources(t) {
		for _, empty := range []string{"util", "utils", "common", "helpers", "manager", "misc", "base", "lib"} {
			if s.name == empty || filepath.Base(s.path) == empty {
				t.Errorf("package %q: the name %s says nothing about what is in it", s.path, empty)
			}
		}
	}
}

func TestPatterns(t *testing.T) {
	for _, test := range []struct {
		pattern, path string
		want          bool
	}{
		{"kvm/...", "kvm", true}, {"kvm/...", "kvm/probe", true}, {"kvm/...", "kvmx", false},
		{"devices/*", "devices/blk", true}, {"devices/*", "devices", false}, {"devices/*", "devices/nic/tap", false},
		{"vmm", "vmm", true}, {"vmm", "vmm/boot", false}, {"...", "anything/at/all", true}, {"", "", true}, {"", "kvm", false},
	} {
		if got := covers(test.pattern, test.path); got != test.want {
			t.Errorf("covers(%q, %q) = %v", test.pattern, test.path, got)
		}
	}
	r := rule{ours: []string{"kvm", ""}, others: []string{sys}}
	for target, want := range map[string]bool{
		module + "/kvm": true, module: true, module + "/vmm": false, sys + "/unix": true, "golang.org/x/sysx": false,
	} {
		if got := r.allows(target); got != want {
			t.Errorf("allows(%q) = %v", target, got)
		}
	}
}

// eachFile parses the imports and declarations of all our Go files.
func eachFile(t *testing.T, check func(path string, file *ast.File)) {
	t.Helper()
	for _, s := range sources(t) {
		for _, path := range s.files {
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Errorf("parse: %v", err)
				continue
			}
			check(path, file)
		}
	}
}
