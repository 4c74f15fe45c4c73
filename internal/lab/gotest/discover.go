package gotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strconv"
	"strings"
)

// requireName is the function that marks a test as one for the lab.
const requireName = "RequireKVM"

// Selection is a package and those of its tests, benchmarks and examples that need KVM.
type Selection struct {
	Package Package
	Names   []string // sorted
}

// Discover finds the tests that reach a call of RequireKVM, directly or through functions, methods and variables of the
// packages given. It works on names alone, which is exact enough: a wrong hit costs the time of one test in the lab.
func Discover(packages []Package) ([]Selection, error) {
	g := graph{uses: make(map[string][]string)}
	for _, p := range packages {
		if err := g.add(p.ImportPath, append(p.files(p.GoFiles), p.files(p.TestGoFiles)...)); err != nil {
			return nil, err
		}
		if err := g.add(externalTests(p), p.files(p.XTestGoFiles)); err != nil {
			return nil, err
		}
	}
	needs := g.reaching(requireName)
	var selections []Selection
	for _, p := range packages {
		var names []string
		for _, scope := range []string{p.ImportPath, externalTests(p)} {
			for _, name := range g.tests[scope] {
				if needs[scope+"."+name] {
					names = append(names, name)
				}
			}
		}
		if len(names) > 0 {
			slices.Sort(names)
			selections = append(selections, Selection{p, names})
		}
	}
	return selections, nil
}

// externalTests is the import path under which the names of a package's _test package are kept.
func externalTests(p Package) string { return p.ImportPath + "_test" }

// graph has a node "import path.Name" for each top-level function, method and variable.
type graph struct {
	uses  map[string][]string // node → nodes it mentions
	tests map[string][]string // import path → names of tests declared there
}

func (g *graph) add(importPath string, files []string) error {
	if g.tests == nil {
		g.tests = make(map[string][]string)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse tests: %w", err)
		}
		imports := importNames(parsed)
		for _, decl := range parsed.Decls {
			g.addDecl(importPath, imports, decl, strings.HasSuffix(file, "_test.go"))
		}
	}
	return nil
}

func (g *graph) addDecl(importPath string, imports map[string]string, decl ast.Decl, inTest bool) {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		node := importPath + "." + name
		g.uses[node] = append(g.uses[node], mentions(importPath, imports, d)...)
		if inTest && d.Recv == nil && isTest(name) {
			g.tests[importPath] = append(g.tests[importPath], name)
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			value, ok := spec.(*ast.ValueSpec)
			if !ok {
				continue
			}
			for _, name := range value.Names {
				node := importPath + "." + name.Name
				g.uses[node] = append(g.uses[node], mentions(importPath, imports, value)...)
			}
		}
	}
}

// mentions lists the nodes whose names appear in a piece of code.
func mentions(importPath string, imports map[string]string, code ast.Node) []string {
	var nodes []string
	ast.Inspect(code, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && imports[x.Name] != "" {
				nodes = append(nodes, imports[x.Name]+"."+n.Sel.Name)
				return false
			}
			nodes = append(nodes, importPath+"."+n.Sel.Name) // a method, perhaps one of ours
		case *ast.Ident:
			nodes = append(nodes, importPath+"."+n.Name)
		}
		return true
	})
	return nodes
}

func importNames(file *ast.File) map[string]string {
	names := make(map[string]string)
	for _, spec := range file.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		name := path.Base(target)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = target
	}
	return names
}

// reaching returns the nodes from which a node of the given name can be reached.
func (g *graph) reaching(name string) map[string]bool {
	usedBy := make(map[string][]string)
	var queue []string
	reached := make(map[string]bool)
	for node, uses := range g.uses {
		for _, use := range uses {
			usedBy[use] = append(usedBy[use], node)
			if strings.HasSuffix(use, "."+name) && !reached[use] {
				reached[use] = true
				queue = append(queue, use)
			}
		}
	}
	for len(queue) > 0 {
		node := queue[0]
		queue = queue[1:]
		for _, user := range usedBy[node] {
			if !reached[user] {
				reached[user] = true
				queue = append(queue, user)
			}
		}
	}
	return reached
}

// isTest says whether the go command runs a function of this name.
func isTest(name string) bool {
	for _, prefix := range []string{"Test", "Benchmark", "Example", "Fuzz"} {
		rest, ok := strings.CutPrefix(name, prefix)
		if ok && (rest == "" || rest[0] < 'a' || rest[0] > 'z') {
			return name != "TestMain"
		}
	}
	return false
}
