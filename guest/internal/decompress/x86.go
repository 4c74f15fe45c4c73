package decompress

import (
	"encoding/binary"
	"io"
)

// x86Reader undoes the filter that makes x86 code compress better: it had turned the targets of CALL (e8) and JMP (e9) from distances
// into absolute positions. The filter guesses what is an instruction, so undoing it means guessing in exactly the same way: targets
// whose top byte is neither 00 nor ff are left alone, and so are ones close behind a byte that looked like another such opcode.
type x86Reader struct {
	r      io.Reader
	buffer []byte // from done on: not yet converted
	ready  int    // converted bytes at the front that were not given out yet
	state  x86State
	err    error
}

func newX86Reader(r io.Reader, start uint32) *x86Reader {
	return &x86Reader{r: r, state: x86State{position: start, last: -1 << 40}}
}

func (x *x86Reader) Read(p []byte) (int, error) {
	for x.ready == 0 {
		if x.err != nil {
			if len(x.buffer) == 0 {
				return 0, x.err
			}
			if x.err != io.EOF {
				return 0, x.err
			}
			x.ready = len(x.buffer) // the last bytes are too few for an instruction
			break
		}
		x.fill()
	}
	n := copy(p, x.buffer[:x.ready])
	x.buffer = x.buffer[n:]
	x.ready -= n
	return n, nil
}

func (x *x86Reader) fill() {
	const size = 64 << 10
	next := make([]byte, size)
	kept := copy(next, x.buffer)
	n, err := io.ReadFull(x.r, next[kept:])
	if err == io.ErrUnexpectedEOF {
		err = io.EOF
	}
	x.buffer, x.err = next[:kept+n], err
	x.ready = x.state.convert(x.buffer)
}

// x86State is what the guess depends on besides the next five bytes.
type x86State struct {
	position uint32 // of the buffer's first byte
	last     int64  // offset of the last opcode seen, from the buffer's first byte
	mask     uint32 // which of the bytes before the current one looked like opcodes or like parts of their targets
}

// allowed says for each mask whether a conversion is possible.
var allowed = [8]bool{true, true, true, false, true, false, false, false}

// suspect says for each mask how far back the byte lies that decides about a repeated conversion.
var suspect = [8]uint{0, 1, 2, 2, 3, 3, 3, 3}

func extreme(b byte) bool { return b == 0x00 || b == 0xff }

// convert undoes the filter in place as far as whole instructions are there, and returns how far that is.
func (s *x86State) convert(p []byte) int {
	i := int64(0)
	for ; i+5 <= int64(len(p)); i++ {
		if p[i]&0xfe != 0xe8 {
			continue
		}
		if distance := i - s.last; distance > 3 {
			s.mask = 0
		} else {
			s.mask = s.mask << uint(distance-1) & 7
			if s.mask != 0 && (!allowed[s.mask] || extreme(p[i+4-int64(suspect[s.mask])])) {
				s.last = i
				s.mask = s.mask<<1 | 1
				continue
			}
		}
		s.last = i
		if !extreme(p[i+4]) {
			s.mask = s.mask<<1 | 1
			continue
		}
		value := s.distance(binary.LittleEndian.Uint32(p[i+1:]), s.position+uint32(i)+5)
		binary.LittleEndian.PutUint32(p[i+1:], value)
		s.mask = 0
		i += 4
	}
	s.last -= i
	s.position += uint32(i)
	return int(i)
}

// distance turns an absolute target back. A target that looked converted already was turned once more, with some bits inverted.
func (s *x86State) distance(target, next uint32) uint32 {
	for {
		value := target - next
		if s.mask == 0 {
			return extend(value)
		}
		bits := suspect[s.mask] * 8
		if !extreme(byte(value >> (24 - bits))) {
			return extend(value)
		}
		target = value ^ (1<<(32-bits) - 1)
	}
}

// extend makes the top byte a copy of bit 24.
func extend(value uint32) uint32 {
	value &= 0x01ffffff
	return value | -(value & 0x01000000)
}
