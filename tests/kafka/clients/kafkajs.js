// kafkajs, with its codec for snappy. What it is asked: record_lines.py
const fs = require('fs')
const { Kafka, CompressionTypes, CompressionCodecs, logLevel } = require('kafkajs')
CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')

const meant = (text) => (text === '-' ? null : Buffer.from(text, 'base64'))
const shown = (value) => (value === null || value === undefined ? '-' : Buffer.from(value).toString('base64'))

// Headers are an object: a name that comes more than once has a list of values.
function headersOf(fields) {
  const headers = {}
  for (const field of fields) {
    const [name, value] = field.split(':').map(meant)
    const before = headers[name]
    headers[name] = before === undefined ? value : [].concat(before, value)
  }
  return headers
}

function pairsOf(headers) {
  const pairs = Object.entries(headers).flatMap(([name, value]) => [].concat(value).map((each) => [name, each]))
  return pairs.map((pair) => pair.map(shown).join(':'))
}

async function produce(kafka, topics) {
  const messages = fs.readFileSync(0, 'utf8').split('\n').slice(0, -1).map((line) => {
    const [, partition, , timestamp, key, value, ...headers] = line.split('\t')
    const message = { partition: Number(partition), key: meant(key), value: meant(value), headers: headersOf(headers) }
    return timestamp === '-' ? message : { ...message, timestamp }
  })
  const producer = kafka.producer()
  await producer.connect()
  for (const [topic, codec] of topics) {
    await producer.send({ topic, messages, compression: { none: 0, gzip: 1, snappy: 2 }[codec] })
  }
  await producer.disconnect()
}

async function consume(kafka, topics) {
  const wanted = topics.reduce((sum, [, count]) => sum + Number(count), 0)
  let rows = 0
  const consumer = kafka.consumer({ groupId: `zoo-${process.pid}`, maxWaitTimeInMs: 100 })
  await consumer.connect()
  await consumer.subscribe({ topics: topics.map(([topic]) => topic), fromBeginning: true })
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error))
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ topic, partition, message }) => {
        const { offset, timestamp, key, value, headers } = message
        const fields = [topic, partition, offset, timestamp, shown(key), shown(value), ...pairsOf(headers)]
        fs.writeSync(1, fields.join('\t') + '\n')
        if (++rows === wanted) resolve()
      },
    })
  })
  await consumer.disconnect()
}

const [command, bootstrap, ...pairs] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'zoo', brokers: [bootstrap], logLevel: logLevel.ERROR })
setTimeout(() => { console.error('not done within 60 s'); process.exit(1) }, 60000).unref()
;({ produce, consume })[command](kafka, pairs.map((pair) => pair.split('='))).then(
  () => process.exit(0), (error) => { console.error(error); process.exit(1) })
