package acpi

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// aml is encoded AML, chapter 20. Builders take encoded terms and return one.
type aml []byte

// AML opcodes, section 20.3.
const (
	opName        = 0x08
	opBytePrefix  = 0x0a
	opWordPrefix  = 0x0b
	opDWordPrefix = 0x0c
	opString      = 0x0d
	opQWordPrefix = 0x0e
	opScope       = 0x10
	opBuffer      = 0x11
	opPackage     = 0x12
	opMethod      = 0x14
	opExtension   = 0x5b
	opNotify      = 0x86
	opDevice      = 0x82 // after opExtension
)

func join(terms ...aml) aml { return slices.Concat(terms...) }

// segment is one part of a name: up to four characters, filled up with "_". The
// names are constants of this package, so a long one is cut, not reported.
func segment(name string) aml {
	return aml((name + "____")[:4])
}

// sized puts a package length before body, section 20.2.4. The length counts
// itself, so the number of its bytes is found first.
func sized(body aml) aml {
	if n := len(body) + 1; n < 1<<6 {
		return join(aml{byte(n)}, body)
	}
	extra := 1
	for len(body)+1+extra >= 1<<(4+8*extra) {
		extra++
	}
	n := len(body) + 1 + extra
	out := aml{byte(extra<<6 | n&0xf)}
	for n >>= 4; extra > 0; extra-- {
		out = append(out, byte(n))
		n >>= 8
	}
	return join(out, body)
}

// integer is encoded in the smallest form.
func integer(v uint64) aml {
	switch {
	case v <= 1:
		return aml{byte(v)} // ZeroOp, OneOp
	case v < 1<<8:
		return aml{opBytePrefix, byte(v)}
	case v < 1<<16:
		return binary.LittleEndian.AppendUint16(aml{opWordPrefix}, uint16(v))
	case v < 1<<32:
		return binary.LittleEndian.AppendUint32(aml{opDWordPrefix}, uint32(v))
	}
	return binary.LittleEndian.AppendUint64(aml{opQWordPrefix}, v)
}

// text is a string of ASCII characters.
func text(s string) aml { return join(aml{opString}, aml(s), aml{0}) }

// eisaID is a compressed seven-character id such as PNP0501, section 19.3.4.
func eisaID(id string) aml {
	v := uint32(0)
	for _, letter := range id[:3] {
		v = v<<5 | uint32(letter-'A'+1)&0x1f
	}
	for _, digit := range id[3:7] {
		d := uint32(digit - '0')
		if digit >= 'A' {
			d = uint32(digit - 'A' + 10)
		}
		v = v<<4 | d
	}
	return binary.BigEndian.AppendUint32(aml{opDWordPrefix}, v)
}

func named(name, value aml) aml { return join(aml{opName}, name, value) }

func scope(name aml, terms ...aml) aml {
	return join(aml{opScope}, sized(join(name, join(terms...))))
}

func device(name aml, terms ...aml) aml {
	return join(aml{opExtension, opDevice}, sized(join(name, join(terms...))))
}

// method is a serialized control method.
func method(name aml, arguments int, terms ...aml) aml {
	const serialized = 1 << 3
	return join(aml{opMethod}, sized(join(name, aml{byte(arguments) | serialized}, join(terms...))))
}

func pack(elements ...aml) aml {
	return join(aml{opPackage}, sized(join(aml{byte(len(elements))}, join(elements...))))
}

func notify(object aml, value uint64) aml {
	return join(aml{opNotify}, object, integer(value))
}

// resources is a buffer of resource descriptors with the end tag. A checksum of
// zero in the tag means that there is none, section 6.4.2.9.
func resources(descriptors ...aml) aml {
	list := join(join(descriptors...), aml{0x79, 0})
	return join(aml{opBuffer}, sized(join(integer(uint64(len(list))), list)))
}

// memoryWindow is a fixed 32-bit range of memory, section 6.4.3.4.
func memoryWindow(base, size uint64) aml {
	const writable = 1
	out := aml{0x86, 9, 0, writable}
	out = binary.LittleEndian.AppendUint32(out, uint32(base))
	return binary.LittleEndian.AppendUint32(out, uint32(size))
}

// ports is a fixed range of I/O ports, section 6.4.2.5.
func ports(first uint16, count byte) aml {
	const decode16 = 1
	out := aml{0x47, decode16}
	out = binary.LittleEndian.AppendUint16(out, first) // lowest base
	out = binary.LittleEndian.AppendUint16(out, first) // highest base
	return append(out, 1, count)                       // alignment, length
}

// edgeInterrupt is an interrupt that only this device has: edge-triggered, active
// high. The extended form, section 6.4.3.6, means a GSI; the short form would
// mean an ISA interrupt, of which a hardware-reduced machine has none.
func edgeInterrupt(gsi uint32) aml {
	const consumer, edge = 1 << 0, 1 << 1
	return binary.LittleEndian.AppendUint32(aml{0x89, 6, 0, consumer | edge, 1}, gsi)
}

// numbered is a segment of a prefix and a number in hexadecimal.
func numbered(prefix string, n int) aml {
	return segment(fmt.Sprintf("%s%0*X", prefix, 4-len(prefix), n))
}
