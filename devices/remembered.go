package devices

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// DecodeState reads a device's state: exactly one JSON value, with nothing behind it
// and no field that S has not, since a state from a newer version must not be half
// understood.
func DecodeState[S any](data []byte) (state S, err error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&state); err != nil {
		return state, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return state, errors.New("data after the end")
	}
	return state, nil
}

// Remembered keeps a device's state as it was decoded last: a machine that is
// reset goes back to the same bytes again and again. Its zero value is empty.
type Remembered[S any] struct {
	data  []byte
	state S
}

// Decode returns what decode makes of the data, or has made of it the last time.
// Nobody may change the data or anything that the state refers to.
func (r *Remembered[S]) Decode(data []byte, decode func([]byte) (S, error)) (S, error) {
	if r.data != nil && bytes.Equal(r.data, data) {
		return r.state, nil
	}
	state, err := decode(data)
	if err == nil {
		r.data, r.state = data, state
	}
	return state, err
}
