package main

import (
	"debug/dwarf"
	"debug/elf"
	"fmt"
)

// A structure is a Go struct with the layout of its C original.
type structure struct {
	name   string
	c      string
	size   int64
	fields []field
}

type field struct {
	name   string // "" for a hole
	typ    string
	offset int64
	size   int64
}

// readStructs finds the variables that compile declared and turns the type of
// each into a Go struct.
func readStructs(f *elf.File) ([]structure, error) {
	d, err := f.DWARF()
	if err != nil {
		return nil, fmt.Errorf("read debug information: %w", err)
	}
	types := map[string]*dwarf.StructType{}
	r := d.Reader()
	for {
		e, err := r.Next()
		if err != nil {
			return nil, fmt.Errorf("read debug information: %w", err)
		}
		if e == nil {
			break
		}
		name, _ := e.Val(dwarf.AttrName).(string)
		off, ok := e.Val(dwarf.AttrType).(dwarf.Offset)
		if e.Tag != dwarf.TagVariable || !ok {
			continue
		}
		t, err := d.Type(off)
		if err != nil {
			return nil, fmt.Errorf("read type of %s: %w", name, err)
		}
		if st, ok := t.(*dwarf.StructType); ok {
			types[name] = st
		}
	}

	named := map[string]string{} // C struct key -> Go name
	for _, def := range structDefs {
		if st := types["want_"+def.name]; st != nil {
			named[key(st)] = def.name
		}
	}
	var list []structure
	for _, def := range structDefs {
		st := types["want_"+def.name]
		if st == nil {
			return nil, fmt.Errorf("type %s: not in the headers", def.expr)
		}
		s := structure{name: def.name, c: def.expr, size: st.ByteSize}
		l := layouter{owner: def.name, named: named}
		if s.fields, err = l.fields(st, 0); err != nil {
			return nil, err
		}
		s.fields = fillHoles(s.fields, s.size)
		list = append(list, s)
	}
	return list, nil
}

// key identifies a C type: by tag, or by its members where it has none.
func key(st *dwarf.StructType) string {
	if st.StructName != "" {
		return st.StructName
	}
	return st.Defn()
}

type layouter struct {
	owner string
	named map[string]string
	pads  int
}

// fields lists the members of st. Members without a name are read as if
// their own members stood there; of an unnamed union the longest counts.
func (l *layouter) fields(st *dwarf.StructType, base int64) ([]field, error) {
	members := st.Field
	if st.Kind == "union" {
		members = l.reading(members)
	}
	var list []field
	for _, m := range members {
		if m.Type.Size() <= 0 { // flexible array: the header ends here
			continue
		}
		offset := base + m.ByteOffset
		if inner, ok := m.Type.(*dwarf.StructType); ok && m.Name == "" {
			sub, err := l.fields(inner, offset)
			if err != nil {
				return nil, err
			}
			list = append(list, sub...)
			continue
		}
		typ, err := l.goType(m.Name, m.Type)
		if err != nil {
			return nil, fmt.Errorf("%s.%s: %w", l.owner, m.Name, err)
		}
		list = append(list, field{l.fieldName(m.Name), typ, offset, m.Type.Size()})
	}
	return list, nil
}

// reading is the one member that stands for an unnamed union.
func (l *layouter) reading(members []*dwarf.StructField) []*dwarf.StructField {
	best := members[0]
	for _, m := range members {
		if m.Name != "" && m.Name == unionMember[l.owner+"."] {
			return []*dwarf.StructField{m}
		}
		if m.Type.Size() >= best.Type.Size() {
			best = m
		}
	}
	return []*dwarf.StructField{best}
}

func (l *layouter) fieldName(c string) string {
	if name, ok := fieldNames[l.owner+"."+c]; ok {
		return name
	}
	if isPadding(c) {
		l.pads++
		return fmt.Sprintf("pad%d", l.pads)
	}
	return goName("", c)
}

func (l *layouter) goType(member string, t dwarf.Type) (string, error) {
	switch t := t.(type) {
	case *dwarf.TypedefType:
		return l.goType(member, t.Type)
	case *dwarf.ArrayType:
		elem, err := l.goType(member, t.Type)
		return fmt.Sprintf("[%d]%s", t.Count, elem), err
	case *dwarf.StructType:
		if t.Kind == "union" {
			return l.unionType(member, t)
		}
		if name := l.named[key(t)]; name != "" {
			return name, nil
		}
		return "", fmt.Errorf("type %s is not listed", t)
	case *dwarf.CharType, *dwarf.UcharType:
		return "uint8", nil
	case *dwarf.IntType:
		return fmt.Sprintf("int%d", 8*t.ByteSize), nil
	case *dwarf.UintType:
		return fmt.Sprintf("uint%d", 8*t.ByteSize), nil
	}
	return "", fmt.Errorf("type %s has no Go form", t)
}

func (l *layouter) unionType(member string, t *dwarf.StructType) (string, error) {
	want, ok := unionMember[l.owner+"."+member]
	if !ok {
		return fmt.Sprintf("[%d]uint8", t.ByteSize), nil
	}
	for _, m := range t.Field {
		if m.Name == want {
			return l.goType(member, m.Type)
		}
	}
	return "", fmt.Errorf("union has no member %s", want)
}

// fillHoles names the bytes the C compiler skips, so that Go skips the same.
func fillHoles(fields []field, size int64) []field {
	var list []field
	at := int64(0)
	hole := func(to int64) {
		if n := to - at; n > 0 {
			list = append(list, field{fmt.Sprintf("hole%d", at), fmt.Sprintf("[%d]uint8", n), at, n})
		}
	}
	for _, f := range fields {
		hole(f.offset)
		list = append(list, f)
		at = f.offset + f.size
	}
	hole(size)
	return list
}
